"""One file per format of an exported model: `format.write(...)`, `format.read(path)`.

A format contains everything from the pixels to the embedding, or what another library needs for that. The
interface is `kinds.Format`.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
