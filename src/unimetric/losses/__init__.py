"""One file per loss: `loss(embeddings (B, D), labels (B,), memory=None) -> scalar`.

The interface is `kinds.Loss`. A loss whose evaluation is not by the cosine overrides
`placed(embeddings) -> (points, options)`. The points are searched in `Space(points, ..., **options)`.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
