"""A pack: one file that holds a dataset's pictures once, at the size that training needs, and its table with them.

A pack is written to the end before it bears its name, is mapped into memory rather than read, and knows its own hash. Its bytes are

    magic (8) | pictures, one after the other | footer, JSON under zlib | sha256 of the footer (32) | its length (8) | magic (8)

and the footer holds the format's version, how the pictures are encoded, the sha256 of them all, the place, height and width of each,
the whole `Table`, and what was left out. No machine's folders are in it: pictures are named relative to the folder that holds them all.

Pictures are read as the papers read them: plainly by Pillow, `convert("RGB")`, the EXIF orientation ignored. Numpy and Pillow only.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.files import CHUNK
from unimetric.images.decode import MOST_PIXELS, load_image, parse_image
from unimetric.images.table import Table

MAGIC = b"UNIPACK\x01"
VERSION = 1
_TAIL = 32 + 8 + len(MAGIC)
ENCODINGS = ("raw", "jpeg", "webp", "png")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def decode(path: str) -> np.ndarray:
    """One picture, (H, W, 3) uint8, from a file or from a row of a pack (`FILE.pack::ROW`).

    A pack is opened once a process and not hashed again here: whoever handed out the locators has done so.

    Args:
        path: where the picture lies, as in `Table.paths`.
    """
    place = located(path)
    if place is None:
        return np.array(load_image(path)[0])
    file, row = place
    return opened(file).picture(row)


def located(path: str) -> tuple[str, int] | None:
    """The pack and the row that a locator names; None for a plain file.

    >>> located("cub.pack::17"), located("albatross.jpg")
    (('cub.pack', 17), None)
    """
    file, mark, row = path.rpartition("::")
    return (file, int(row)) if mark and file.endswith(".pack") and row.isdecimal() else None


def opened(file: str) -> Pack:
    """A pack that this process has open already, or opens now, without hashing its pictures again."""
    return OPEN_PACKS.get(file) or Pack.open(file, verify=False)


def map_in_order(function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int) -> Generator[_Result, None, None]:
    """`map` in threads, in the order of the items, with only a few results waiting: a dataset need not fit into memory."""
    pool = ThreadPoolExecutor(workers)
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Pack:
    """An open pack. Get one with `Pack.open` or from `write`.

    Attributes:
        path: the file.
        table: its `Table`; paths are locators, `FILE.pack::ROW`.
        names: what each picture was called, relative to the dataset's folder.
        sizes: (N, 2) int64, height and width.
        encoding: `raw`, `jpeg`, `webp` or `png`.
        sha256: of all pictures' bytes.
        skipped: (name, reason) of each picture that was left out when the pack was written.
    """

    def __init__(self, path: str, footer: dict[str, Any], bytes_: np.ndarray) -> None:
        self.path = path
        self.encoding: str = footer["encoding"]
        self.short_side: int | None = footer["short_side"]
        self.quality: int = footer["quality"]
        self.sha256: str = footer["sha256"]
        self.names = tuple(footer["names"])
        self.skipped: tuple[tuple[str, str], ...] = tuple((name, reason) for name, reason in footer["skipped"])
        self.sizes = np.stack([np.asarray(footer["height"], np.int64), np.asarray(footer["width"], np.int64)], 1)
        self.table = Table(
            paths=tuple(f"{path}::{row}" for row in range(len(self.names))),
            class_names=tuple(footer["class_names"]),
            source_names=tuple(footer["source_names"]),
            **{key: np.asarray(footer[key]) for key in ("labels", "train", "query", "gallery", "source")},
        )
        self._offsets = np.asarray(footer["offset"], np.int64)
        self._lengths = np.asarray(footer["length"], np.int64)
        self._bytes = bytes_  # (P,) uint8, the pictures and nothing else, mapped
        pixels = self.sizes.prod(1) * 3
        if (
            not len(self.table) == len(self.sizes) == len(self._offsets) == len(self._lengths) > 0
            or self.encoding not in ENCODINGS
            or self.sizes.min() < 1
            or pixels.max() > 3 * MOST_PIXELS
            or self._lengths.min() < 1
            or (self._offsets != np.concatenate([[0], self._lengths.cumsum()[:-1]])).any()
            or self._lengths.sum() != len(bytes_)
            or (self.encoding == "raw" and (pixels != self._lengths).any())
        ):
            raise ValueError("the footer contradicts itself")

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> Pack:
        """Map a pack into memory, after checking that it is whole.

        Args:
            path: the file.
            verify: hash all pictures, too; without it only the frame and the table are checked.
        """
        path = str(path)
        again = "pack the dataset again: `unimetric pack --help`"
        if not path.endswith(".pack"):
            raise UnimetricError(f"{path}: a pack's name ends in .pack", again)
        try:
            with open(path, "rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise UnimetricError(f"{path}: is not a pack", again)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                tail = file.read()
                length = int.from_bytes(tail[32:40], "little")
                payload = size - _TAIL - length - len(MAGIC)
                if tail[40:] != MAGIC or payload < 1:
                    raise UnimetricError(f"{path}: is cut short or altered", again)
                file.seek(len(MAGIC) + payload)
                footer = file.read(length)
        except OSError as error:
            reason = "there is no such pack" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise UnimetricError(f"{path}: {reason}", again) from None
        if hashlib.sha256(footer).digest() != tail[:32]:
            raise UnimetricError(f"{path}: its table is altered", again)
        try:
            content = json.loads(zlib.decompressobj().decompress(footer, 1 << 31))
            if content["version"] > VERSION:
                raise UnimetricError(f"{path}: was written by a newer Unimetric", "update Unimetric, or pack the dataset again")
            pack = cls(path, content, np.memmap(path, np.uint8, "r", offset=len(MAGIC), shape=(payload,)))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise UnimetricError(f"{path}: its table cannot be understood ({error})", again) from None
        if verify:
            digest = hashlib.sha256()
            for start in range(0, payload, CHUNK):
                digest.update(pack._bytes[start : start + CHUNK].data)
            if digest.hexdigest() != pack.sha256:
                raise UnimetricError(f"{path}: its pictures are altered", again)
        OPEN_PACKS[path] = pack
        return pack

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pack.open, (self.path, False)  # to another process goes the name, not the pictures

    def picture_bytes(self, row: int) -> bytes:
        """A picture as it is stored.

        Args:
            row: of the table.
        """
        return self._span(row).tobytes()

    def picture(self, row: int) -> np.ndarray:
        """A picture, (H, W, 3) uint8; the array is the caller's own.

        Args:
            row: of the table.
        """
        span = self._span(row)
        height, width = self.sizes[row]
        if self.encoding == "raw":
            return np.array(span).reshape(height, width, 3)
        array = np.array(parse_image(span.tobytes(), f"{self.path}::{row}")[0])
        if array.shape[:2] != (height, width):
            raise UnimetricError(f"{self.path}::{row}: is not of the size that the table says", "pack the dataset again")
        return array

    def _span(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise UnimetricError(f"{self.path}::{row}: the pack has only {len(self)} pictures", "pack the dataset again")
        return self._bytes[self._offsets[row] : self._offsets[row] + self._lengths[row]]

    def decoded(
        self,
        rows: np.ndarray | None = None,
        *,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All pixels in one array, for a computer's or an accelerator's memory.

        Returns (P,) uint8, the pictures (H, W, 3) one after the other; (N,) int64, where each begins; (N, 2) int64, heights and widths.
        All rows of a raw pack come without a copy, as a read-only view of the file.

        Args:
            rows: which pictures, in this order; default all.
            workers: threads that decode; default one a core.
            progress: called with (pictures done, pictures in all).
        """
        if rows is None and self.encoding == "raw":
            return self._bytes, self._offsets, self.sizes
        chosen = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        sizes = self.sizes[chosen]
        ends = (sizes.prod(1) * 3).cumsum()
        offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(chosen)]
        pixels = np.empty(int(ends[-1]) if len(chosen) else 0, np.uint8)

        def fill(numbers: range) -> int:
            for number in numbers:
                pixels[offsets[number] : ends[number]] = self.picture(int(chosen[number])).reshape(-1)
            return len(numbers)

        few = 32  # pictures a task: enough to make the hand-over cheap, few enough for a smooth bar
        tasks = [range(start, min(start + few, len(chosen))) for start in range(0, len(chosen), few)]
        done = 0
        with closing(map_in_order(fill, tasks, workers or _cores())) as counts:
            for count in counts:
                done += count
                if progress is not None:
                    progress(done, len(chosen))
        return pixels, offsets, sizes


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


#: Packs that this process has open, by path.
OPEN_PACKS: dict[str, Pack] = {}
