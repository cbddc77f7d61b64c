"""Files at addresses such as `s3://bucket/shoes.tar`, read through fsspec.

They are read whole or by byte ranges. Functions accept local paths as well.
A failed request is repeated; a file that is missing or forbidden is an error at once.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, TypeVar

import numpy as np

from unimetric.arguments import local_path
from unimetric.errors import UnimetricError

#: Only protocols of plain storage: a list of images from somebody else may contain addresses.
PROTOCOLS = ("s3", "gs", "gcs", "az", "abfs", "hf", "http", "https", "memory")
_ADDRESS = re.compile(rf"({'|'.join(PROTOCOLS)})://", re.IGNORECASE)
_PASSWORD = re.compile(r"\w+://[^/@]*:[^/@]*@")
#: Fields of fsspec that differ between two versions of a file.
_VERSION = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "updated", "created", "Content-MD5", "blob_id")
#: Seconds before a failed request is repeated.
_PAUSES = (0.5, 2.0)
#: Bytes of a sequential read, and bytes that it may skip.
_BLOCK, _GAP = 1 << 23, 1 << 16

#: Requests at once while files are listed.
_THREADS = 32
_CREDENTIALS = "set credentials as the fsspec package of this storage describes"

#: File systems of this process. After a fork, fsspec drops them. Closing their connections would remove these from the event loop that the
#: child shares with its parent, which would then wait for an answer forever.
_KEPT: dict[int, Any] = {}

_Result = TypeVar("_Result")


class Unreachable(UnimetricError):
    """Storage that does not answer.

    No image is skipped for it, because it will be readable later.
    """


def is_remote(path: str) -> bool:
    """Return whether a path is an address of storage that fsspec can read.

    >>> is_remote("s3://bucket/a.tar"), is_remote("https://host/a.pack::17"), is_remote("data/a.tar"), is_remote("file:///a.tar")
    (True, True, False, False)
    """
    return _ADDRESS.match(path) is not None


def make_absolute(path: str) -> str:
    """Return an absolute local path, and an address unchanged."""
    return path if is_remote(path) else os.path.abspath(path)


def join_path(folder: str, path: str) -> str:
    """Return a path relative to a folder or to the address of one.

    An address as `path` remains. With a local folder, `file:///a%20b.jpg` is the local path `/a b.jpg`.

    >>> join_path("https://host/data", "../more/a.jpg"), join_path("https://host/data", "s3://bucket/a.jpg")
    ('https://host/more/a.jpg', 's3://bucket/a.jpg')
    """
    if is_remote(path):
        return path
    if not is_remote(folder):
        path = local_path(path) if path[:8].lower() == "file:///" else path
        return os.path.normpath(os.path.join(folder, path))
    protocol, _, rest = folder.partition("://")
    root, _, inner = rest.partition("/")
    whole = posixpath.normpath(f"/{inner}/{path}").lstrip("/")  # two leading slashes would remain
    return f"{protocol}://{root}/{whole}"


def common_folder(paths: Iterable[str]) -> str:
    """Return the deepest common folder of absolute paths or addresses; "" if there is none.

    >>> common_folder(["s3://bucket/a/1.tar", "s3://bucket/b/2.tar"]), common_folder(["s3://bucket/1.tar", "/data/1.tar"])
    ('s3://bucket', '')
    """
    folders = {os.path.dirname(path) for path in paths}
    protocols = {folder.partition("://")[0] if is_remote(folder) else "" for folder in folders}
    if len(protocols) > 1:
        return ""
    protocol = protocols.pop()
    if not protocol:
        with suppress(ValueError):  # several drives
            return os.path.commonpath(folders)
        return ""
    common = posixpath.commonpath([folder.partition("://")[2] for folder in folders])
    return f"{protocol}://{common}" if common else ""


def open_storage(place: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path on it."""
    try:
        fsspec = importlib.import_module("fsspec")
    except ModuleNotFoundError:
        raise UnimetricError(f"{place}: remote storage requires fsspec", "pip install 'unimetric[storage]'") from None
    try:
        files, inner = fsspec.core.url_to_fs(place)
        _KEPT[id(files)] = files
        return files, inner
    except ImportError as error:  # the message of fsspec names the package of the protocol
        raise UnimetricError(f"{place}: cannot be reached: {error}", "install that package with pip") from None
    except ValueError as error:
        raise UnimetricError(f"{place}: cannot be reached: {error}", "use a folder, or a URL such as `s3://bucket/study`") from None


def file_status(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes, and its time in nanoseconds.

    At an address, the time is a number that changes with the file.

    Raises:
        OSError: There is no such local file.
        UnimetricError: There is no such file at an address, or it may not be read.
    """
    if not is_remote(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    global _ahead
    _ahead = _Ahead()  # the bytes may be those of an earlier version
    found = _request(path, _read_info)
    if found.get("type") == "directory" or found.get("size") is None:
        raise UnimetricError(f"{path}: must be a file of known size", "name a file; a web server must send `Content-Length`")
    version = repr([str(found.get(key)) for key in _VERSION]).encode()
    return int(found["size"]), int.from_bytes(hashlib.blake2b(version, digest_size=6).digest(), "little")


def find_statuses(paths: Iterable[str]) -> dict[str, tuple[int, int] | None]:
    """Return the status of each file at an address.

    It is None if the file is missing or may not be read. Local paths are skipped. Many requests run at once.
    """
    remote = sorted({path for path in paths if is_remote(path)})
    if not remote:
        return {}
    with ThreadPoolExecutor(min(_THREADS, len(remote))) as pool:
        return dict(zip(remote, pool.map(_find_status, remote), strict=True))


def _find_status(path: str) -> tuple[int, int] | None:
    try:
        return file_status(path)
    except Unreachable:
        raise
    except UnimetricError:
        return None


def _read_info(files: Any, path: str) -> dict[str, Any]:
    files.invalidate_cache()
    return dict(files.info(path))


def find_files(pattern: str) -> list[str]:
    """Return the addresses of a pattern with wildcards, sorted."""
    protocol = pattern.partition("://")[0]
    found = _request(pattern, lambda files, path: files.glob(path))
    return sorted(each if is_remote(each) else f"{protocol}://{each.lstrip('/')}" for each in found)


def read_file(path: str) -> bytes:
    """Read a whole file at an address."""
    return _request(path, lambda files, inner: bytes(files.cat_file(inner)))


class _Ahead(threading.local):
    """Last bytes of each thread: path, position, content, and end of the used part."""

    last: tuple[str, int, bytes, int] = ("", 0, b"", 0)


_ahead = _Ahead()


def read_range(path: str, start: int, length: int) -> bytes:
    """Read bytes of a file at an address.

    If a thread reads a file sequentially, each request is twice as long as the last one.

    Raises:
        Unreachable: The bytes cannot be read, though the file was opened before.
    """
    held = _ahead
    before, begin, data, end = held.last
    inside = start - begin
    if path != before or inside < 0 or inside + length > len(data):
        follows = path == before and 0 <= start - end <= _GAP
        wanted = max(length, min(2 * len(data), _BLOCK)) if follows else length
        begin, inside = start, 0
        try:
            data = _fetch(path, start, wanted)
        except UnimetricError as error:
            raise Unreachable(error.message, error.hint) from None
        if len(data) < length:
            raise Unreachable(f"{path}: was replaced by a shorter file", "open the dataset again, or restore the file")
    held.last = path, begin, data, start + length
    return data[inside : inside + length]


def _fetch(path: str, start: int, length: int) -> bytes:
    """Read at most `length` bytes."""
    data = _request(path, lambda files, inner: bytes(files.cat_file(inner, start=start, end=start + length)))
    if len(data) > length:  # the server has sent the whole file
        raise UnimetricError(f"{path}: its server must support byte ranges", "use another server, or copy the file to this machine")
    return data


class RemoteBytes:
    """Bytes of a file at an address, which a slice reads.

    Args:
        path: Address.
        start: Position of the first byte.
        size: Number of bytes.
    """

    def __init__(self, path: str, start: int, size: int) -> None:
        self.path, self.start, self.size = path, start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> np.ndarray:
        begin, end, _ = span.indices(self.size)
        return np.frombuffer(read_range(self.path, self.start + begin, end - begin), np.uint8)


class _RemoteFile(io.RawIOBase):
    """File at an address, opened for reading."""

    def __init__(self, path: str) -> None:
        self.path, self.size, self.position = path, file_status(path)[0], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self.size - self.position)
        if length <= 0:
            return 0
        data = _fetch(self.path, self.position, length)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def open_file(path: str, block: int = _BLOCK) -> IO[bytes]:
    """Open a local file, or a file at an address, for reading.

    Args:
        path: Path or address.
        block: Bytes per request to an address.
    """
    return io.BufferedReader(_RemoteFile(path), block) if is_remote(path) else open(path, "rb")


# --- requests ----------------------------------------------------------------------------------------------------------


def _request(path: str, question: Callable[[Any, str], _Result]) -> _Result:
    """Return the answer of a file system, with repetitions if it fails."""
    if "::" in path or _PASSWORD.match(path):
        raise UnimetricError(f"{path}: an address must have neither `::` nor a password", _CREDENTIALS)
    for pause in (*_PAUSES, None):
        try:
            files, inner = open_storage(path)
            if path.lower().startswith("http"):  # part of a name, because addresses with a query are not supported
                inner = inner.replace("#", "%23").replace("?", "%3F")
            return question(files, inner)
        except (UnimetricError, MemoryError):
            raise
        except Exception as error:  # each storage has its own errors
            problem = _explain(path, error)
        if pause is None or not isinstance(problem, Unreachable):
            break
        time.sleep(pause)
    raise problem


def _explain(path: str, error: Exception) -> UnimetricError:
    """Return the error of a failed request."""
    # fsspec reports every failure of a web server as a missing file.
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception) else error
    status = vars(cause).get("status")  # of aiohttp
    status = status if isinstance(status, int) else 0
    reason = " ".join(str(cause).split())[:200] or type(cause).__name__
    if isinstance(cause, FileNotFoundError | IsADirectoryError) or status in (404, 410):
        return UnimetricError(f"{path}: there is no such file", "check the address")
    if isinstance(cause, PermissionError) or status in (401, 403) or "credentials" in reason.lower():
        return UnimetricError(f"{path}: no permission ({reason})", _CREDENTIALS)
    if 400 <= status < 500 and status not in (408, 425, 429):
        return UnimetricError(f"{path}: its server answers {reason}", "check the address")
    return Unreachable(f"{path}: cannot be reached: {reason}", "check the network and the address, then run the same command again")
