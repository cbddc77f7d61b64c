"""Decoded copies of packs in the cache folder.

    UNIMETRIC_CACHE/decoded/FINGERPRINT.pack

Only the first run on a machine decodes a pack; all others map the copy. It is a raw pack, named by the hash
of the images that it was made from. Its own hash is checked when it is opened. It can be deleted at any time.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.files import cache_folder, wait_for_lock
from unimetric.images.pack import Pack, count_cores
from unimetric.images.packing import write

#: Bytes of pixels from which a copy saves time, its largest share of the free disk, and the days after which an unused one is deleted.
_LEAST, _SHARE, _DAYS = 1 << 28, 0.1, 30


def decoded_copy(pack: Pack, needed: int, *, progress: Callable[[int, int], None] | None = None) -> Pack:
    """Return the decoded copy of a pack, which the first call makes, or the pack itself.

    There is no copy of a raw or small pack, if fewer than half of the images are needed, or if the copy
    would take more than a tenth of the free disk. While a process makes one, others wait for it.

    Args:
        pack: Pack whose images are decoded.
        needed: Number of images that are needed.
        progress: Callback with (finished images, all images), while a copy is made.
    """
    size = 3 * int(pack.sizes.prod(1).sum())
    if pack.encoding == "raw" or size < _LEAST or 2 * needed < len(pack):
        return pack
    path = cache_folder() / "decoded" / f"{pack.fingerprint[:32]}.pack"
    # If the copy cannot be written, or an image cannot be decoded, the caller decodes the pack and reports the image.
    with suppress(OSError, UnimetricError):
        return _open(path, pack) or _make(path, pack, size, progress)
    return pack


def _open(path: Path, pack: Pack) -> Pack | None:
    """Return the copy of a pack, or None if there is none, or it is damaged or another one."""
    if path.is_file():
        with suppress(UnimetricError):
            copy = Pack.open(path)
            if copy.encoding == "raw" and np.array_equal(copy.sizes, pack.sizes):
                os.utime(path)
                return copy
    return None


def _make(path: Path, pack: Pack, size: int, progress: Callable[[int, int], None] | None) -> Pack:
    """Make the copy of a pack, or wait for a process that makes it."""
    with wait_for_lock(path.with_suffix(".lock")):
        if copy := _open(path, pack):
            return copy
        _delete_unused(path.parent)
        if size > _SHARE * shutil.disk_usage(path.parent).free:
            return pack
        return write(path, pack.table, short_side=None, encoding="raw", workers=count_cores(), progress=progress)


def _delete_unused(folder: Path) -> None:
    """Delete copies that no run has opened for a month."""
    for copy in folder.glob("*.pack"):
        if time.time() - copy.stat().st_mtime > _DAYS * 86400:
            copy.unlink(missing_ok=True)
