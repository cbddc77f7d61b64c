"""Dataset stored in one file by `unimetric pack`."""

from __future__ import annotations

from unimetric.images.pack import Pack
from unimetric.images.table import Table


def pack(*, path: str) -> Table:
    """Dataset stored in one file by `unimetric pack`, after a check of its hash.

    At an address, images are read by byte ranges, and only the hash of the table is checked.

    Args:
        path: Path of the file, `NAME.pack`, or its address, such as `s3://bucket/NAME.pack`.
    """
    return Pack.open(path).table
