"""One file per adapter: `adapter(backbone) -> backbone`.

Only the inserted parameters are trainable.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
