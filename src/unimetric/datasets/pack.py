"""A dataset that `unimetric pack` has stored in one file."""

from __future__ import annotations

from unimetric.images.pack import Pack
from unimetric.images.table import Table


def pack(*, path: str) -> Table:
    """The table inside a pack; the pack is checked by its hash before anything is read from it.

    Args:
        path: the file, `NAME.pack`.
    """
    return Pack.open(path).table
