"""Files that are whole or not there: what was before stays until the new one is on the disk. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from unimetric.errors import UnimetricError


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A name to write to; it takes the place of `path` when all is written, and is gone if anything fails."""
    if not path.name:  # `.` or `/`
        raise UnimetricError(f"{path}: is a folder", "name a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be written: {error.strerror or error}", "free some room, or choose another --out") from None
    finally:
        with contextlib.suppress(OSError):  # nothing to remove where nothing could be made
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """A small file, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")  # a file's name need not be UTF-8


def write_bytes(path: Path, data: bytes) -> None:
    """The same of bytes."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)
