"""One file per split: `split(table) -> Split`, the rows of each part.

The parts are training, validation and testing.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
