"""Pack: one file with all images of a dataset at training size, and their table.

A pack gets its name only when it is completely written. It is memory-mapped rather than read, or read
by byte ranges at an address such as `s3://bucket/cub.pack`. It stores the hash of its content. Its bytes are

    magic (8) | images, concatenated | footer, JSON under zlib
    | sha256 of the footer (32) | its length (8) | magic (8)

The footer holds the format version, the image encoding, the sha256 of the images' sha256 (before version
2: of the images), the offset, height and width of each, the whole `Table`, and the skipped images. It
contains no absolute path: image names are relative to their common folder.

Numpy and Pillow only.
"""

from __future__ import annotations

import hashlib
import io
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
from PIL import Image

from unimetric.errors import UnimetricError
from unimetric.files import CHUNK
from unimetric.images.decode import MOST_PIXELS, load_image, parse_image
from unimetric.images.remote import RemoteBytes, is_remote, open_file
from unimetric.images.table import COLUMNS, Table

MAGIC = b"UNIPACK\x01"
VERSION = 2
_TAIL = 32 + 8 + len(MAGIC)
ENCODINGS = ("raw", "jpeg", "webp", "png")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def decode(path: str) -> np.ndarray:
    """Decode one image to (H, W, 3) uint8, from a file or a row of a pack (`FILE.pack::ROW`).

    A pack is opened once per process. Its hash is not checked again here, because the code that
    created the locators has checked it.

    Args:
        path: Path of the image, as in `Table.paths`.
    """
    location = located(path)
    if location is None:
        return np.array(load_image(path)[0])
    file, row = location
    return opened(file).picture(row)


def make_thumbnail(path: str, side: int, quality: int = 82) -> bytes:
    """Return a small JPEG file of an image, upright.

    Args:
        path: Path of the image.
        side: Pixels of the longer side.
        quality: Quality of the JPEG file.
    """
    image = Image.fromarray(decode(path)) if located(path) else load_image(path)[0]
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def located(path: str) -> tuple[str, int] | None:
    """Return the pack and the row of a locator, or None for a plain file.

    >>> located("cub.pack::17"), located("albatross.jpg")
    (('cub.pack', 17), None)
    """
    file, mark, row = path.rpartition("::")
    if mark and file.endswith(".pack") and row.isdecimal():
        return file, int(row)
    return None


def opened(file: str) -> Pack:
    """Return a pack that is open in this process, or open it.

    The hash of its images is not checked.
    """
    return OPEN_PACKS.get(file) or Pack.open(file, verify=False)


def map_in_order(function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int) -> Generator[_Result, None, None]:
    """Apply a function in threads, and yield the results in the order of the items.

    Only a few results are pending at a time, so that a dataset need not fit into memory.
    """
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
    """Open pack. Get one with `Pack.open` or from `write`.

    Attributes:
        path: File of the pack.
        table: `Table` whose paths are locators, `FILE.pack::ROW`.
        names: Name of each image, relative to the folder of the dataset.
        sizes: (N, 2) int64 height and width.
        lengths: (N,) int64 number of stored bytes.
        encoding: `raw`, `jpeg`, `webp` or `png`.
        sha256: Hash of the hashes of all images; before version 2, of their bytes.
        skipped: (name, reason) of each image that was skipped when the pack was written.
    """

    def __init__(self, path: str, footer: dict[str, Any], bytes_: np.ndarray | RemoteBytes) -> None:
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
            group_names=tuple(footer.get("group_names", ())),
            group_rule=footer.get("group_rule", "class"),
            **{key: np.asarray(footer[key]) for key in COLUMNS if key in footer},  # packs without groups lack `group`
        )
        self._offsets = np.asarray(footer["offset"], np.int64)
        self.lengths = np.asarray(footer["length"], np.int64)
        self._bytes = bytes_  # (P,) uint8, only the images, memory-mapped or at an address
        pixels = self.sizes.prod(1) * 3
        if (
            not len(self.table) == len(self.sizes) == len(self._offsets) == len(self.lengths) > 0
            or self.encoding not in ENCODINGS
            or self.sizes.min() < 1
            or pixels.max() > 3 * MOST_PIXELS
            or self.lengths.min() < 1
            or (self._offsets != np.concatenate([[0], self.lengths.cumsum()[:-1]])).any()
            or self.lengths.sum() != len(bytes_)
            or (self.encoding == "raw" and (pixels != self.lengths).any())
        ):
            raise ValueError("the footer is inconsistent")

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> Pack:
        """Map a pack into memory, after checking that it is complete.

        Args:
            path: File or address of the pack.
            verify: Whether to check the hash of all images. Without it, or at an address, only the
                frame and the table are checked.
        """
        path = str(path)
        again = "pack the dataset again: `unimetric pack --help`"
        if not path.endswith(".pack"):
            raise UnimetricError(f"{path}: the name of a pack must end in .pack", again)
        try:
            with open_file(path, 1 << 16) as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise UnimetricError(f"{path}: is not a pack", again)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                tail = file.read()
                length = int.from_bytes(tail[32:40], "little")
                payload = size - _TAIL - length - len(MAGIC)
                if tail[40:] != MAGIC or payload < 1:
                    raise UnimetricError(f"{path}: is truncated or modified", again)
                file.seek(len(MAGIC) + payload)
                footer = file.read(length)
        except OSError as error:
            reason = "there is no such pack" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise UnimetricError(f"{path}: {reason}", again) from None
        if hashlib.sha256(footer).digest() != tail[:32]:
            raise UnimetricError(f"{path}: its table was modified", again)
        try:
            content = json.loads(zlib.decompressobj().decompress(footer, 1 << 31))
            if content["version"] > VERSION:
                raise UnimetricError(f"{path}: was written by a newer Unimetric", "update Unimetric, or pack the dataset again")
            if is_remote(path):
                images: Any = RemoteBytes(path, len(MAGIC), payload)
            else:
                images = np.memmap(path, np.uint8, "r", offset=len(MAGIC), shape=(payload,))
            pack = cls(path, content, images)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise UnimetricError(f"{path}: its table cannot be parsed ({error})", again) from None
        # Downloading all images to check them would take as long as an epoch.
        if verify and not is_remote(path) and pack._hash(content["version"]) != pack.sha256:
            raise UnimetricError(f"{path}: its images were modified", again)
        OPEN_PACKS[path] = pack
        return pack

    def _hash(self, version: int) -> str:
        digest = hashlib.sha256()
        if version == 1:  # one core, from the first byte to the last
            for start in range(0, len(self._bytes), CHUNK):
                digest.update(self._bytes[start : start + CHUNK].data)
            return digest.hexdigest()

        def hashes(rows: range) -> bytes:
            return b"".join(hashlib.sha256(self._span(row).data).digest() for row in rows)

        for part in map_in_order(hashes, self._groups(len(self)), count_cores()):
            digest.update(part)
        return digest.hexdigest()

    @staticmethod
    def _groups(count: int) -> list[range]:
        few = 32  # images per task: enough to make scheduling cheap, few enough for a smooth progress bar
        return [range(start, min(start + few, count)) for start in range(0, count, few)]

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pack.open, (self.path, False)  # another process receives the path, not the images

    @property
    def fingerprint(self) -> str:
        """Hash of the images and their sizes. The footer stores the first, so no image is read."""
        return hashlib.sha256(self.sha256.encode() + self.sizes.tobytes()).hexdigest()

    def picture_bytes(self, row: int) -> bytes:
        """Return the stored bytes of an image.

        Args:
            row: Row of the table.
        """
        return self._span(row).tobytes()

    def picture(self, row: int) -> np.ndarray:
        """Decode an image to a new array (H, W, 3) uint8.

        Args:
            row: Row of the table.
        """
        span = self._span(row)
        height, width = self.sizes[row]
        if self.encoding == "raw":
            return np.array(span).reshape(height, width, 3)
        # Images are upright before they are packed. Older packs may contain EXIF orientations, which were ignored.
        array = np.array(parse_image(span.tobytes(), f"{self.path}::{row}", upright=False)[0])
        if array.shape[:2] != (height, width):
            raise UnimetricError(
                f"{self.path}::{row}: must be {height} x {width} pixels as in its table, got {array.shape[0]} x {array.shape[1]}",
                "pack the dataset again",
            )
        return array

    def _span(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise UnimetricError(f"{self.path}::{row}: the pack has only {len(self)} images", "pack the dataset again")
        return self._bytes[self._offsets[row] : self._offsets[row] + self.lengths[row]]

    def decoded(
        self,
        rows: np.ndarray | None = None,
        *,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Decode images into one array, for the memory of the host or of an accelerator.

        Consecutive rows of a raw pack are returned without a copy, as a read-only view of the file.

        Args:
            rows: Rows to decode, in this order. Defaults to all.
            workers: Number of decoding threads. Defaults to one per core.
            progress: Function called with (images done, images in total).

        Returns:
            (P,) uint8 pixels of the images (H, W, 3), concatenated; (N,) int64 start of each; (N,
            2) int64 heights and widths.
        """
        chosen = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        sizes = self.sizes[chosen]
        if self.encoding == "raw" and isinstance(self._bytes, np.ndarray) and len(chosen) and (np.diff(chosen) == 1).all():
            begin, end = self._offsets[chosen[0]], self._offsets[chosen[-1]] + self.lengths[chosen[-1]]
            return self._bytes[begin:end], self._offsets[chosen] - begin, sizes
        ends = (sizes.prod(1) * 3).cumsum()
        offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(chosen)]
        pixels = np.empty(int(ends[-1]) if len(chosen) else 0, np.uint8)

        def fill(numbers: range) -> int:
            first, last = (int(chosen[number]) for number in (numbers[0], numbers[-1]))
            if last - first == len(numbers) - 1:  # one request for all at an address, and nothing in a memory-mapped file
                self._bytes[self._offsets[first] : self._offsets[last] + self.lengths[last]]
            for number in numbers:
                pixels[offsets[number] : ends[number]] = self.picture(int(chosen[number])).reshape(-1)
            return len(numbers)

        done = 0
        with closing(map_in_order(fill, self._groups(len(chosen)), workers or count_cores())) as counts:
            for count in counts:
                done += count
                if progress is not None:
                    progress(done, len(chosen))
        return pixels, offsets, sizes


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: Packs that are open in this process, by path.
OPEN_PACKS: dict[str, Pack] = {}
