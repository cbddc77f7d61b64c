"""Run folders on remote storage that fsspec can open, such as `s3://bucket/study`.

Folders of this machine need no fsspec.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unimetric.errors import UnimetricError
from unimetric.files import write_bytes
from unimetric.images.remote import open_storage


def on_disk(place: str) -> Path | None:
    """Return the absolute folder of a path or `file://` URL, or None for remote storage."""
    protocol, separator, path = place.partition("://")
    if separator and protocol not in ("file", "local"):
        return None
    return Path(path if separator else place).expanduser().absolute()


def _open_fresh(place: str) -> tuple[Any, str]:
    """Open remote storage, without listings from before other programs wrote to it."""
    files, path = open_storage(place)
    files.invalidate_cache()
    return files, path


def finished(place: str, run_id: str, *, pictures: bool = False) -> bool:
    """Return whether a run is done and, with `pictures`, has its `gallery.npz`."""
    names = ["done", "gallery.npz"] if pictures else ["done"]
    folder = on_disk(place)
    if folder is not None:
        return all((folder / run_id / name).exists() for name in names)
    files, path = _open_fresh(place)
    return all(files.exists(f"{path}/{run_id}/{name}") for name in names)


def read(place: str, name: str) -> bytes | None:
    """Read a small file, or return None if it does not exist."""
    folder = on_disk(place)
    try:
        if folder is not None:
            return (folder / name).read_bytes()
        files, path = _open_fresh(place)
        return files.cat_file(f"{path}/{name}")
    except OSError:
        return None


def list_files(place: str) -> set[str]:
    """Return the names of the files in a folder or at a URL; none if it does not exist."""
    folder = on_disk(place)
    try:
        if folder is not None:
            return {each.name for each in folder.iterdir()}
        files, path = _open_fresh(place)
        return {os.path.basename(each) for each in files.ls(path, detail=False)}
    except OSError:
        return set()


def remove(place: str, name: str) -> None:
    """Remove a file if it exists."""
    folder = on_disk(place)
    with suppress(FileNotFoundError):
        if folder is not None:
            (folder / name).unlink()
        else:
            files, path = open_storage(place)
            files.rm_file(f"{path}/{name}")


def pull(place: str, folder: Path, *, weights: bool = True) -> None:
    """Download the files of remote storage into a local folder.

    Args:
        place: URL of a run folder, or of a folder of run folders.
        folder: Local folder.
        weights: Whether to download checkpoints and models. A report does not need them.
    """
    files, path = _open_fresh(place)
    root = files._strip_protocol(path)
    for each in files.find(path):
        if weights or not each.endswith(".safetensors"):
            target = folder / os.path.relpath(each, root)
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(each, str(target))


class Mirror:
    """Context manager that repeatedly copies a run folder to remote storage.

    The checkpoint is copied after the other files, in the version from before they were read. So the stored files are never older than
    the stored checkpoint, and a run can resume from them. `done` is copied last.

    Args:
        folder: Local run folder.
        place: URL of the copy.
        seconds: Time between two copies, in seconds.
    """

    def __init__(self, folder: Path, place: str, *, seconds: float = 30.0) -> None:
        self.folder, self.place, self.seconds = folder, place, seconds
        self.sent: dict[str, tuple[float, int]] = {}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._copy_repeatedly, daemon=True)

    def __enter__(self) -> Mirror:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.copy()

    def _copy_repeatedly(self) -> None:
        while not self.stop.wait(self.seconds):
            try:
                self.copy()
            except Exception as error:  # each storage has its own errors; a run survives a network failure
                print(f"{self.place}: copy failed, retrying in {self.seconds:g} s: {error}", file=sys.stderr)

    def copy(self) -> None:
        """Copy the files that have changed since the last copy."""
        if not self.folder.exists():
            return
        with _hard_link(self.folder / "checkpoint.safetensors") as checkpoint:
            first = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
            first = [path for path in first if path.name not in ("checkpoint.safetensors", "done")]
            for path in first:
                self._send(path, str(path.relative_to(self.folder)))
            if checkpoint is not None:
                self._send(checkpoint, "checkpoint.safetensors")
            if (self.folder / "done").exists():
                self._send(self.folder / "done", "done")

    def _send(self, path: Path, name: str) -> None:
        state = path.stat()
        if self.sent.get(name) != (state.st_mtime, state.st_size):
            files, root = open_storage(self.place)
            files.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
            files.put_file(str(path), f"{root}/{name}")
            self.sent[name] = (state.st_mtime, state.st_size)


@contextmanager
def _hard_link(path: Path) -> Iterator[Path | None]:
    """Keep the present version of a file under a second name while the file may be replaced."""
    second = path.with_name(".sending")
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except FileNotFoundError:
        yield None
        return
    try:
        yield second
    finally:
        second.unlink(missing_ok=True)


def write(place: str, name: str, data: bytes) -> None:
    """Write a small file.

    On a disk the write is atomic; object stores publish complete files only.
    """
    folder = on_disk(place)
    if folder is not None:
        write_bytes(folder / name, data)
        return
    files, path = open_storage(place)
    files.makedirs(path, exist_ok=True)
    files.pipe_file(f"{path}/{name}", data)


@contextmanager
def local_copies(places: list[str]) -> Iterator[list[Path]]:
    """Context manager of local folders, with temporary copies of remote ones.

    The copies have no weights.
    """
    with tempfile.TemporaryDirectory() as here:
        folders = []
        for number, place in enumerate(places):
            folder = on_disk(place)
            if folder is None:
                folder = Path(here) / str(number)
                folder.mkdir()
                pull(place, folder, weights=False)
                if not any(folder.iterdir()):
                    raise UnimetricError(f"{place}: no such folder, or it is empty", "name run folders, or a folder of a study")
            folders.append(folder)
        yield folders


def absolute(place: str | Path) -> str:
    """Return an absolute path for a local folder, and a URL unchanged."""
    folder = on_disk(str(place))
    return str(place) if folder is None else str(folder)
