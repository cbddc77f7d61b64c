"""Write files atomically: a file is the old or the new one, never a part. No torch."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from unimetric.errors import FULL_DISK, UnimetricError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """Return the cache folder: `UNIMETRIC_CACHE`, or that of the user."""
    if sys.platform == "darwin":
        system = "~/Library/Caches"
    elif sys.platform == "win32":
        system = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    else:
        system = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("UNIMETRIC_CACHE") or os.path.join(system, "unimetric")).expanduser()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a file or folder.

    A process that ends releases the lock. A file remains; it is created if there is nothing. Without effect on a system without locks.
    """
    if fcntl is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def system_error(error: Exception) -> OSError:
    """Return the error of the system that a library in Rust reports as text.

    >>> system_error(Exception("I/O error: No space left on device (os error 28)")).errno
    28
    """
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


@contextmanager
def _explain_failure(path: Path) -> Iterator[None]:
    """Raise an error with the path and a hint if the system cannot write a file."""
    try:
        yield
    except OSError as error:
        hint = "free some space, or use another disk" if error.errno in FULL_DISK else "use another path, which you can write to"
        raise UnimetricError(f"{path}: cannot be written: {error.strerror or error}", hint) from None


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` once written, and is removed on failure."""
    if not path.name:  # `.` or `/`
        raise UnimetricError(f"{path}: is a folder", "name a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _explain_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # there is nothing to remove if it could not be created
            temporary.unlink()


def check_writable(path: Path) -> None:
    """Raise an error if a file cannot be written. Call this before long work.

    Creates neither the file nor its folder.
    """
    with _explain_failure(path):
        if path.is_dir():
            raise UnimetricError(f"{path}: is a folder", "name a file")
        folder = next(each for each in path.parents if each.exists())
        tempfile.TemporaryFile(dir=folder).close()


def is_temporary(name: str) -> bool:
    """Return whether a name is that of an incomplete file of `atomic` or `atomic_stream`.

    >>> is_temporary(".done.1234"), is_temporary("done")
    (True, False)
    """
    return re.fullmatch(r"\..+\.(\d+|[0-9a-f]{12}\.part)", name) is not None


def remove_stale(folder: Path) -> None:
    """Remove the temporary files that killed processes have left in a folder.

    Args:
        folder: Folder that no other process writes to.
    """
    for path in folder.iterdir():
        if is_temporary(path.name):
            with suppress(OSError):
                path.unlink()


#: File in the folder of an export that is being written. An export that was killed leaves it, and can be repeated.
UNFINISHED = ".unfinished"


def make_folder(path: Path, *, unfinished: bool = False) -> None:
    """Make a folder for an output, and mark it as unfinished if wanted."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if unfinished:
            (path / UNFINISHED).touch()
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be created: {error.strerror}", "choose another --out") from None


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")  # file names need not be UTF-8


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file atomically."""
    write_text(path, json.dumps(content, indent=1))


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes to a file atomically."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


CHUNK = 1 << 24
#: Error numbers of the system for a path that cannot be written.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EIO)


def sync_folder(path: Path) -> None:
    """Make the new names in a folder survive a power failure, if its file system can."""
    with suppress(OSError, AttributeError):
        folder = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def atomic_stream(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that gets its name only when it is complete and on disk.

    On any error, it is removed.

    If the system supports it (Linux), the file has no name until then, so that even a killed
    process leaves nothing behind.
    """
    # `atomic` would use a named file. A pack streams gigabytes, and a partial file must not remain.
    hidden = path.parent / f".{path.name}.{secrets.token_hex(6)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            os.lstat(hidden)  # a name that is too long fails now, not after the last image
        named, handle = _unnamed(path.parent, hidden)
        try:
            with open(handle, "wb", buffering=CHUNK) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if not named:
                    # `src_dir_fd` only makes Python follow the link to the open file.
                    os.link(f"/proc/self/fd/{file.fileno()}", hidden, src_dir_fd=file.fileno(), follow_symlinks=True)
            os.replace(hidden, path)
        finally:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in FULL_DISK:
            reason, hint = "the disk is full", "free some space, write elsewhere, or use a smaller short_side or quality"
        elif error.errno in _UNWRITABLE:
            reason, hint = f"cannot be written ({error.strerror})", "use another path, which you can write to"
        else:
            raise
        raise UnimetricError(f"{path}: {reason}; nothing was written", hint) from error


def _unnamed(folder: Path, name: Path) -> tuple[bool, int]:
    """Create a file for writing. Return whether it has the name already, and its descriptor."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):  # on other file systems, it has a name from the start
            return False, os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    return True, os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)


def write_arrays(path: Path, *, compressed: bool = False, **arrays: np.ndarray) -> None:
    """Write an `.npz` file atomically."""
    with atomic(path) as temporary, open(temporary, "wb") as file:  # given a path, numpy would append .npz
        save = np.savez_compressed if compressed else np.savez
        save(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path, hint: str) -> dict[str, np.ndarray]:
    """Read the arrays of an `.npz` file.

    A missing, invalid or truncated file is an error with this hint.
    """
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # numpy would suggest to load it unsafely
                raise zipfile.BadZipFile("not a zip archive, or incomplete")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise UnimetricError(f"{path}: no such file", hint) from None
    except IsADirectoryError:
        raise UnimetricError(f"{path}: must be an .npz file, got a folder", hint) from None
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):  # such as class names from pandas
            hint = "save text as text: `labels=np.array(labels, dtype=str)`"
        raise UnimetricError(f"{path}: must be an intact .npz file: {error}", hint) from None
