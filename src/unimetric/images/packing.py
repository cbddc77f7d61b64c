"""Write a pack: read, shrink and encode the images of a table, and store them with the table in one file."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
from PIL import Image

from unimetric.errors import UnimetricError, closest
from unimetric.files import atomic_stream
from unimetric.images.decode import INTERPOLATIONS, encode, load_image, shrink
from unimetric.images.pack import ENCODINGS, MAGIC, OPEN_PACKS, VERSION, Pack, decode, located, map_in_order, opened
from unimetric.images.table import Table


def write(
    path: str | Path,
    table: Table,
    *,
    short_side: int | None = 256,
    encoding: str = "jpeg",
    quality: int = 92,
    interpolation: str = "bilinear",
    workers: int = 2,
    on_bad_picture: str = "error",
    progress: Callable[[int, int], None] | None = None,
    read: Callable[[str], np.ndarray] | None = None,
) -> Pack:
    """Store the pictures of a table in one file, and open it.

    The file appears whole or not at all; a file of that name is replaced. A picture that is small enough and already encoded as wanted
    is kept byte for byte, so that `short_side=None` packs a folder of JPEGs without loss.

    Args:
        path: the file to write; its name ends in `.pack`.
        table: what to store; its paths may lie in other packs.
        short_side: pixels of the shorter side after shrinking; nothing is ever enlarged. None keeps every size.
        encoding: `jpeg`, `webp`, `png` (lossless) or `raw` (decoded: large, but nothing is left to do when training starts).
        quality: of JPEG and WebP, 1 to 100.
        interpolation: `bilinear`, `bicubic`, `lanczos` or `nearest`; all but the last with antialiasing.
        workers: threads that decode and encode.
        on_bad_picture: `error` stops at the first picture that cannot be read; `skip` leaves such out and lists them in `Pack.skipped`.
        progress: called with (pictures done, pictures in all).
        read: gives the (H, W, 3) or (H, W) uint8 array for a path, in place of the files; called from several threads.
    """
    path = Path(path)
    _check_options(path, table, short_side, encoding, quality, interpolation, workers, on_bad_picture)

    def entry(source: str) -> tuple[bytes, int, int] | UnimetricError:
        try:
            image, data, native = load_image(source) if read is None and located(source) is None else _from_array(source, read or decode)
        except UnimetricError as error:
            if on_bad_picture == "error":
                raise
            return error
        small = shrink(image, short_side, interpolation)
        if not (small is image and native == encoding):
            try:
                data = encode(small, encoding, quality)
            except (OSError, ValueError) as error:  # WebP ends at 16,383 pixels a side, JPEG at 65,535
                raise UnimetricError(
                    f"{source}: cannot be stored as {encoding} ({error})", "choose a short_side, or another encoding"
                ) from None
        return data, small.height, small.width

    names = _relative(table.paths)
    kept, skipped = [], []
    offsets, lengths, heights, widths = [], [], [], []
    digest, offset = hashlib.sha256(), 0
    with atomic_stream(path) as file, closing(map_in_order(entry, table.paths, workers)) as results:
        file.write(MAGIC)
        for row, result in enumerate(results):
            if isinstance(result, UnimetricError):
                skipped.append([names[row], result.message.removeprefix(f"{table.paths[row]}: ")])
            else:
                data, height, width = result
                file.write(data)
                digest.update(data)
                kept.append(row)
                offsets.append(offset)
                lengths.append(len(data))
                heights.append(height)
                widths.append(width)
                offset += len(data)
            if progress is not None:
                progress(row + 1, len(table))
        if not kept:
            raise UnimetricError(
                f"{path}: none of the {len(table)} pictures can be read; the first: {' '.join(skipped[0])}", "check the dataset"
            )
        stored = table.take(np.array(kept))
        footer = zlib.compress(
            json.dumps(
                {
                    "version": VERSION,
                    "encoding": encoding,
                    "short_side": short_side,
                    "quality": quality,
                    "interpolation": interpolation,
                    "sha256": digest.hexdigest(),
                    "offset": offsets,
                    "length": lengths,
                    "height": heights,
                    "width": widths,
                    "skipped": skipped,
                    "names": [names[row] for row in kept],
                    "class_names": stored.class_names,
                    "source_names": stored.source_names,
                    **{key: getattr(stored, key).astype(int).tolist() for key in ("labels", "train", "query", "gallery", "source")},
                },
                separators=(",", ":"),
            ).encode(),
            6,
        )
        file.write(footer + hashlib.sha256(footer).digest() + len(footer).to_bytes(8, "little") + MAGIC)
        OPEN_PACKS.pop(str(path), None)
    return Pack.open(path, verify=False)


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
    """Stop before the first picture is read."""
    choices: list[tuple[str, str, Sequence[str]]] = [
        ("encoding", encoding, ENCODINGS),
        ("interpolation", interpolation, tuple(INTERPOLATIONS)),
        ("on_bad_picture", on_bad_picture, ("error", "skip")),
    ]
    for key, value, known in choices:
        if value not in known:
            raise UnimetricError(f'no {key} = "{value}"', closest(value, known))
    if short_side is not None and short_side < 1:
        raise UnimetricError(f"short_side = {short_side} is no size", "choose pixels, such as 256, or None to keep every size")
    if not 1 <= quality <= 100:
        raise UnimetricError(f"quality = {quality} is out of range", "choose 1 to 100; 92 is hard to tell from the original")
    if workers < 1:
        raise UnimetricError(f"workers = {workers} can do nothing", "choose 1 or more")
    if os.path.isdir(path):
        raise UnimetricError(f"{path}: is a folder", "name a file that ends in .pack")
    if path.suffix != ".pack":
        raise UnimetricError(f"{path}: a pack's name ends in .pack", f"write `{path.with_suffix('.pack').name}`")
    if not len(table):
        raise UnimetricError(f"{path}: the table is empty, there is nothing to pack", "check the dataset")


def _from_array(source: str, read: Callable[[str], np.ndarray]) -> tuple[Image.Image, bytes, str]:
    array = read(source)
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        raise TypeError(f"`read` gave {array.dtype} {array.shape} for {source}; a picture is uint8 (H, W, 3) or (H, W)")
    return Image.fromarray(array).convert("RGB"), b"", ""


def _relative(paths: Sequence[str]) -> list[str]:
    """Names that say nothing of the machine: relative to the deepest folder that holds them all; in a pack already, those it has there."""
    if any(map(located, paths)):
        return [_name_in_pack(path) or os.path.basename(path) for path in paths]
    whole = [os.path.abspath(path) for path in paths]
    try:
        folder = os.path.commonpath({os.path.dirname(path) for path in whole})
    except ValueError:  # several drives
        return [os.path.basename(path) for path in whole]
    return [path[len(folder) :].lstrip(os.sep).replace(os.sep, "/") for path in whole]


def _name_in_pack(path: str) -> str:
    """What a picture was called before it came into its pack; empty for a file and for a row that is not there, as reading it will say."""
    place = located(path)
    with suppress(UnimetricError, IndexError):
        return opened(place[0]).names[place[1]] if place else ""
    return ""
