"""One file per head: `head(tokens (B, 1 + N, C)) -> raw embedding (B, D)`.

The attribute `dim` is D. The first token is the global token of the image; the others are the spatial
positions of the backbone's last stage. The interface is `kinds.Head`.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
