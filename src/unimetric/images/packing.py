"""Write a pack: shrink and encode the images of a table, and store them with the table."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from unimetric.errors import UnimetricError, closest
from unimetric.files import atomic_stream
from unimetric.images import QUALITY
from unimetric.images.decode import INTERPOLATIONS, encode, load_image, shrink
from unimetric.images.pack import ENCODINGS, MAGIC, OPEN_PACKS, VERSION, Pack, decode, located, map_in_order, opened
from unimetric.images.remote import Unreachable, common_folder, make_absolute
from unimetric.images.table import COLUMNS, Table


def write(
    path: str | Path,
    table: Table,
    *,
    short_side: int | None = 256,
    encoding: str = "jpeg",
    quality: int = QUALITY,
    interpolation: str = "bilinear",
    workers: int = 2,
    on_bad_picture: str = "error",
    progress: Callable[[int, int], None] | None = None,
    read: Callable[[str], np.ndarray] | None = None,
) -> Pack:
    """Store the images of a table in one file, and open it.

    The file is written atomically and replaces a file of the same name. An image that is small enough and
    has the requested encoding is copied unchanged, so `short_side=None` packs JPEG files without loss.

    Args:
        path: File to write. Its name ends in `.pack`.
        table: Table of the images. Its paths may be rows of other packs.
        short_side: Upper bound of the shorter side in pixels. Images are never enlarged. None keeps
            every size.
        encoding: `jpeg`, `webp`, `png` (lossless) or `raw` (decoded: large, but training starts at once).
        quality: Quality of JPEG and WebP, 1 to 100.
        interpolation: `bilinear`, `bicubic`, `lanczos` or `nearest`, all but the last with antialiasing.
        workers: Number of threads that decode and encode.
        on_bad_picture: `error` stops at the first image that cannot be read; `skip` lists such images in
            `Pack.skipped`.
        progress: Callback with (finished images, all images).
        read: Function that returns the uint8 array (H, W, 3) or (H, W) of a path, instead of the file.
            Several threads call it.

    Returns:
        The pack.
    """
    path = Path(path)
    _check_options(path, table, short_side, encoding, quality, interpolation, workers, on_bad_picture)
    settings: dict[str, Any] = {"encoding": encoding, "short_side": short_side, "quality": quality, "interpolation": interpolation}
    footer = Footer(table, settings)

    def make_entry(source: str) -> Entry | UnimetricError:
        return entry(source, read=read, skip=on_bad_picture == "skip", **settings)

    with atomic_stream(path) as file, closing(map_in_order(make_entry, table.paths, workers)) as results:
        file.write(MAGIC)
        for row, result in enumerate(results):
            if isinstance(result, UnimetricError):
                footer.skip(row, result)
            else:
                file.write(result.data)
                footer.add(row, result)
            if progress is not None:
                progress(row + 1, len(table))
        if not footer.rows:
            raise UnimetricError(
                f"{path}: none of the {len(table)} images can be read; the first: {' '.join(footer.skipped[0])}", "check the dataset"
            )
        file.write(footer.encoded())
        OPEN_PACKS.pop(str(path), None)
    return Pack.open(path, verify=False)


class Entry(NamedTuple):
    """An encoded image, its size in pixels, and its hash."""

    data: bytes
    height: int
    width: int
    sha256: bytes


def entry(
    source: str,
    *,
    short_side: int | None,
    encoding: str,
    quality: int,
    interpolation: str,
    read: Callable[[str], np.ndarray] | None = None,
    skip: bool = False,
) -> Entry | UnimetricError:
    """Read, shrink and encode one image.

    Args:
        source: Path of the image, or a row of a pack.
        short_side: Upper bound of the shorter side in pixels, or None.
        encoding: Encoding of the result.
        quality: Quality of JPEG and WebP.
        interpolation: Filter of the shrinking.
        read: Function that returns the pixels of a path, instead of the file.
        skip: Whether an image that cannot be read returns its error instead of raising it.

    Returns:
        The entry, or the error of a skipped image.
    """
    try:
        if read is None and located(source) is None:
            image, data, native = load_image(source)
        else:
            image, data, native = _from_array(source, read or decode), b"", ""
    except UnimetricError as error:
        if skip and not isinstance(error, Unreachable):
            return error
        raise
    small = shrink(image, short_side, interpolation)
    if not (small is image and native == encoding):
        try:
            data = encode(small, encoding, quality)
        except (OSError, ValueError) as error:  # WebP allows 16,383 pixels per side, JPEG 65,535
            raise UnimetricError(f"{source}: cannot be stored as {encoding} ({error})", "set `short_side`, or use `png`") from None
    return Entry(data, small.height, small.width, hashlib.sha256(data).digest())


class Footer:
    """Index at the end of a pack.

    It collects the rows while they are written, then encodes itself.

    Args:
        table: Table that is packed.
        settings: Encoding settings to store.
    """

    def __init__(self, table: Table, settings: dict[str, Any]) -> None:
        self.table, self.settings = table, settings
        self.names = relative_names(table.paths)
        self.digest = hashlib.sha256()
        self.rows: list[int] = []
        self.skipped: list[list[str]] = []
        self.columns: dict[str, list[int]] = {"offset": [], "length": [], "height": [], "width": []}
        self.offset = 0

    def add(self, row: int, entry: Entry) -> None:
        """Add a row whose data has been written."""
        self.digest.update(entry.sha256)
        self.rows.append(row)
        values = (self.offset, len(entry.data), entry.height, entry.width)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        self.offset += len(entry.data)

    def skip(self, row: int, error: UnimetricError) -> None:
        """Add a row that cannot be read."""
        self.skipped.append([self.names[row], error.message.removeprefix(f"{self.table.paths[row]}: ")])

    def encoded(self) -> bytes:
        """Return the compressed footer, its SHA-256, its length and the magic number."""
        stored = self.table.take(np.array(self.rows))
        content = {
            "version": VERSION,
            **self.settings,
            "sha256": self.digest.hexdigest(),
            **self.columns,
            "skipped": self.skipped,
            "names": [self.names[row] for row in self.rows],
            "class_names": stored.class_names,
            "source_names": stored.source_names,
        }
        for key in COLUMNS:
            content[key] = getattr(stored, key).astype(int).tolist()
        if stored.group_names:
            content |= {"group_names": stored.group_names, "group_rule": stored.group_rule}
        else:  # the bytes of a pack without groups are those of earlier versions
            del content["group"]
        footer = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 6)
        return footer + hashlib.sha256(footer).digest() + len(footer).to_bytes(8, "little") + MAGIC


def _check_options(
    path: Path,
    table: Table,
    short_side: int | None,
    encoding: str,
    quality: int,
    interpolation: str,
    workers: int,
    on_bad_picture: str,
) -> None:
    """Raise an error for options that cannot work, before an image is read."""
    choices: list[tuple[str, str, Sequence[str]]] = [
        ("encoding", encoding, ENCODINGS),
        ("interpolation", interpolation, tuple(INTERPOLATIONS)),
        ("on_bad_picture", on_bad_picture, ("error", "skip")),
    ]
    for key, value, known in choices:
        if value not in known:
            raise UnimetricError(f"`{key}` must be one of {', '.join(known)}, got `{value}`", closest(value, known))
    if short_side is not None and short_side < 1:
        raise UnimetricError(f"`short_side` must be at least 1 pixel, got {short_side}", "use 256, or None to keep the original size")
    if not 1 <= quality <= 100:
        raise UnimetricError(f"`quality` must be from 1 to 100, got {quality}", f"use `quality={QUALITY}`")
    if workers < 1:
        raise UnimetricError(f"`workers` must be at least 1, got {workers}", "use `workers=2`")
    if os.path.isdir(path):
        raise UnimetricError(f"{path}: is a folder", "name a file that ends in .pack")
    if path.suffix != ".pack":
        raise UnimetricError(f"{path}: the name of a pack must end in .pack", f"write `{path.with_suffix('.pack').name}`")
    if not len(table):
        raise UnimetricError(f"{path}: the table must have at least 1 image, got none", "check the dataset")


def _from_array(source: str, read: Callable[[str], np.ndarray]) -> Image.Image:
    """Return the image of an array."""
    array = read(source)
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        raise TypeError(f"`read` must return uint8 of shape (H, W, 3) or (H, W), got {array.dtype} {array.shape} for {source}")
    return Image.fromarray(array).convert("RGB")


def relative_names(paths: Sequence[str]) -> list[str]:
    """Return paths relative to their deepest common folder.

    Rows of a pack keep the names that it stores.

    Args:
        paths: Paths of images, as in `Table.paths`.
    """
    if any(map(located, paths)):
        return [_name_in_pack(path) or os.path.basename(path) for path in paths]
    whole = [make_absolute(path) for path in paths]
    folder = common_folder(whole)
    if not folder:  # several drives or storages
        return [os.path.basename(path) for path in whole]
    return [path[len(folder) :].lstrip(os.sep).replace(os.sep, "/") for path in whole]


def _name_in_pack(path: str) -> str:
    """Return the name that a pack stores for a row, or "" for a file or a missing row."""
    location = located(path)
    if location is None:
        return ""
    with suppress(UnimetricError, IndexError):  # reading the row raises a better error
        return opened(location[0]).names[location[1]]
    return ""
