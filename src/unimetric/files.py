"""Write files atomically: a file is either the old one or the new one, never a part of it. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from unimetric.errors import FULL_DISK, UnimetricError


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


CHUNK = 1 << 24


@contextmanager
def atomic_stream(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name only when it is whole and on the disk; on any error nothing of it is left.

    Where the system can (Linux), it has no name at all until then, so that not even a killed process leaves anything behind.
    """
    # Not `files.atomic`, which hands out a name: a pack streams gigabytes through one open file, whose remains nobody would want.
    hidden = path.parent / f".{path.name}.{secrets.token_hex(6)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            os.lstat(hidden)  # a name that is too long shows now, not after the last picture
        named, handle = _unnamed(path.parent, hidden)
        try:
            with open(handle, "wb", buffering=CHUNK) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if not named:
                    # The folder's descriptor makes Python follow the link to the open file; it plays no part otherwise.
                    os.link(f"/proc/self/fd/{file.fileno()}", hidden, src_dir_fd=file.fileno(), follow_symlinks=True)
            os.replace(hidden, path)
        finally:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
        with suppress(OSError, AttributeError):  # so that the new name, too, outlives a power cut; some file systems cannot
            folder = os.open(path.parent, os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        if error.errno in FULL_DISK:
            reason, hint = "the disk is full", "free some space, write elsewhere, or choose a smaller short_side or quality"
        elif error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOENT,
            errno.ENOTDIR,
            errno.EEXIST,
            errno.ENAMETOOLONG,
            errno.EIO,
        ):
            reason, hint = f"cannot be written ({error.strerror})", "write to a folder of your own"
        else:
            raise
        raise UnimetricError(f"{path}: {reason}; nothing was written", hint) from error


def _unnamed(folder: Path, name: Path) -> tuple[bool, int]:
    """A new file to write to: whether it has the name, and its descriptor."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):  # some file systems cannot; then it has a name from the start
            return False, os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    return True, os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)


def write_arrays(path: Path, *, compressed: bool = False, **arrays: np.ndarray) -> None:
    """An `.npz` file, atomically."""
    with atomic(path) as temporary, open(temporary, "wb") as file:  # by handle: numpy would add .npz to the temporary name
        (np.savez_compressed if compressed else np.savez)(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path, hint: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file; an error with this hint where it is none, or only the beginning of one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise UnimetricError(f"{path}: no such file", hint) from None
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UnimetricError(f"{path}: not an .npz file, or a damaged one: {error}", hint) from None
