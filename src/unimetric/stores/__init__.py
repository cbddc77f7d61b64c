"""One file per store: vectors under string ids, with columns to filter by.

`unimetric.kinds.Store` is their interface.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
