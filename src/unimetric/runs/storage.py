"""Run folders on storage that is no disk of this machine: what fsspec reaches, such as `s3://bucket/study`."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unimetric.errors import UnimetricError
from unimetric.files import write_bytes

_WEIGHTS = (".safetensors",)


def _opened(place: str) -> tuple[Any, str]:
    """The file system that a place lies on, and where."""
    try:
        return fsspec.core.url_to_fs(place)
    except (ValueError, ImportError) as error:
        hint = "install it" if isinstance(error, ImportError) else "name a folder, or a place such as `s3://bucket/study`"
        raise UnimetricError(f"{place}: cannot be reached: {error}", hint) from None


def on_disk(place: str) -> Path | None:
    """The folder behind a place if this machine can open it as a folder (a disk, or one shared over the network); otherwise nothing."""
    files, path = _opened(place)
    return Path(path) if isinstance(files, LocalFileSystem) else None


def finished(place: str, run_id: str, *, pictures: bool = False) -> bool:
    """Whether a run is done, and has its pictures for the report if they are wanted."""
    files, path = _opened(place)
    return all(files.exists(f"{path}/{run_id}/{name}") for name in ("done", *(("gallery.npz",) if pictures else ())))


def read(place: str, name: str) -> bytes | None:
    """A small file, if it is there."""
    files, path = _opened(place)
    files.invalidate_cache()
    try:
        return files.cat_file(f"{path}/{name}")
    except (FileNotFoundError, OSError):
        return None


def pull(place: str, folder: Path, *, weights: bool = True) -> None:
    """Bring what is stored under a place into a folder here.

    Args:
        place: a run folder, or a folder of run folders.
        folder: where to put it.
        weights: bring checkpoints and models, too; a report needs none.
    """
    files, path = _opened(place)
    files.invalidate_cache()
    root = files._strip_protocol(path)
    for each in files.find(path):
        if weights or not each.endswith(_WEIGHTS):
            target = folder / os.path.relpath(each, root)
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(each, str(target))


class Mirror:
    """While inside, a run folder here is copied to a place elsewhere every few seconds, and once more at the end.

    The checkpoint goes last, and is the one that was there before the others were read: what is stored beside a stored checkpoint is as
    old as the checkpoint or newer, which is what a run needs to go on from it. `done` follows when all else is there.

    Args:
        folder: the run folder here.
        place: where it is kept.
        seconds: between two copies.
    """

    def __init__(self, folder: Path, place: str, *, seconds: float = 30.0) -> None:
        self.folder, self.place, self.seconds = folder, place, seconds
        self.sent: dict[str, tuple[float, int]] = {}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._copy_now_and_then, daemon=True)

    def __enter__(self) -> Mirror:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop.set()
        self.thread.join()
        self.copy()

    def _copy_now_and_then(self) -> None:
        while not self.stop.wait(self.seconds):
            try:
                self.copy()
            except Exception as error:  # each kind of storage has its own; a run does not end by a moment without network
                print(f"{self.place}: not stored, tried again in {self.seconds:g} s: {error}", file=sys.stderr)

    def copy(self) -> None:
        """Send what has changed since it was sent."""
        if not self.folder.exists():
            return
        with _held(self.folder / "checkpoint.safetensors") as checkpoint:
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
            files, root = _opened(self.place)
            files.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
            files.put_file(str(path), f"{root}/{name}")
            self.sent[name] = (state.st_mtime, state.st_size)


@contextmanager
def _held(path: Path) -> Iterator[Path | None]:
    """The file as it is now under a second name, whatever takes its place meanwhile."""
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
    """A small file: on a disk atomically; an object store shows nothing before it is whole anyway."""
    folder = on_disk(place)
    if folder is not None:
        write_bytes(folder / name, data)
        return
    files, path = _opened(place)
    files.makedirs(path, exist_ok=True)
    files.pipe_file(f"{path}/{name}", data)


@contextmanager
def local_copies(places: list[str]) -> Iterator[list[Path]]:
    """Folders that can be opened here: themselves, or while inside copies without weights of what is stored elsewhere."""
    with tempfile.TemporaryDirectory() as here:
        folders = []
        for number, place in enumerate(places):
            folder = on_disk(place)
            if folder is None:
                folder = Path(here) / str(number)
                folder.mkdir()
                pull(place, folder, weights=False)
            folders.append(folder)
        yield folders


def absolute(place: str | Path) -> str:
    """A place that means the same from every working directory."""
    files, path = _opened(str(place))
    return str(Path(path).absolute()) if isinstance(files, LocalFileSystem) else str(place)
