"""A pack: one file that holds a dataset's pictures once, at the size that training needs, and its table with them.

A pack is written to the end before it bears its name, is mapped into memory rather than read, and knows its own hash. Its bytes are

    magic (8) | pictures, one after the other | footer, JSON under zlib | sha256 of the footer (32) | its length (8) | magic (8)

and the footer holds the format's version, how the pictures are encoded, the sha256 of them all, the place, height and width of each,
the whole `Table`, and what was left out. No machine's folders are in it: pictures are named relative to the folder that holds them all.

Pictures are read as the papers read them: plainly by Pillow, `convert("RGB")`, the EXIF orientation ignored. Numpy and Pillow only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from PIL import Image

from unimetric.errors import FULL_DISK, UnimetricError, closest
from unimetric.table import Table

_MAGIC = b"UNIPACK\x01"
_VERSION = 1
_TAIL = 32 + 8 + len(_MAGIC)
_INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_ENCODINGS = ("raw", "jpeg", "webp", "png")
# Only still pictures: Pillow would hand an .eps to Ghostscript, and none of the datasets has any.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
#: The most pixels that a picture may have, Pillow's own limit for a decompression bomb; here so that nobody can switch it off from afar.
MOST_PIXELS = 178_956_970
_SKIP_HINT = 'mend or remove it, or leave such pictures out with `on_bad_picture = "skip"`, or `unimetric pack --skip-bad`'
_CHUNK = 1 << 24

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


# --- one picture ----------------------------------------------------------------------------------------------------


def decode(path: str) -> np.ndarray:
    """One picture, (H, W, 3) uint8, from a file or from a row of a pack (`FILE.pack::ROW`).

    A pack is opened once a process and not hashed again here: whoever handed out the locators has done so.

    Args:
        path: where the picture lies, as in `Table.paths`.
    """
    place = located(path)
    if place is None:
        return np.array(_load(path)[0])
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
    return _OPEN.get(file) or Pack.open(file, verify=False)


def _load(path: str) -> tuple[Image.Image, bytes, str]:
    """An RGB picture, the bytes of its file, and the format these are in if they could stand for the picture (else nothing)."""
    if not os.path.isfile(path):  # looked at before it is opened: to open a pipe would wait for ever
        raise UnimetricError(f"{path}: {'is not a file' if os.path.exists(path) else 'there is no such picture'}", _SKIP_HINT)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # the machine's trouble, not the picture's: it must not be skipped
        raise UnimetricError(f"{path}: cannot be read ({error.strerror})", _SKIP_HINT) from None
    return _parse(data, path)


def _parse(data: bytes, name: str) -> tuple[Image.Image, bytes, str]:
    if not data:
        raise UnimetricError(f"{name}: is empty", _SKIP_HINT)
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise Image.DecompressionBombError
        native = (image.format or "").lower() if image.mode == "RGB" else ""
        if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion would clip nearly all of it to white
            image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # the same colours as the direct way, without Pillow's warning
        return image.convert("RGB"), data, native
    except MemoryError:
        raise
    except Image.UnidentifiedImageError:
        raise UnimetricError(f"{name}: is not a picture", _SKIP_HINT) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnimetricError(f"{name}: has more than {MOST_PIXELS // 10**6} megapixels, a decompression bomb", _SKIP_HINT) from None
    except Exception as error:  # a broken file raises whatever its decoder stumbles over: OSError, SyntaxError, struct.error, ...
        raise UnimetricError(f"{name}: cannot be decoded ({error})", _SKIP_HINT) from None


def _shrunk(image: Image.Image, short_side: int | None, interpolation: str) -> Image.Image:
    width, height = image.size
    short = min(width, height)
    if short_side is None or short <= short_side:
        return image
    size = (int(short_side * width / short), int(short_side * height / short))
    return image.resize(size, _INTERPOLATIONS[interpolation])  # Pillow's filters widen as the picture shrinks: antialiased


def _encoded(image: Image.Image, encoding: str, quality: int) -> bytes:
    if encoding == "raw":
        return image.tobytes()
    out = io.BytesIO()
    if encoding == "jpeg":
        # From 90 on colours are kept at full resolution: fine-grained classes differ by the colour of a few pixels.
        image.save(out, "JPEG", quality=quality, subsampling=0 if quality >= 90 else 2)
    elif encoding == "webp":
        image.save(out, "WEBP", quality=quality, method=4)
    else:
        image.save(out, "PNG", compress_level=6)
    return out.getvalue()


# --- writing --------------------------------------------------------------------------------------------------------


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
            image, data, native = _load(source) if read is None and located(source) is None else _from_array(source, read or decode)
        except UnimetricError as error:
            if on_bad_picture == "error":
                raise
            return error
        small = _shrunk(image, short_side, interpolation)
        if not (small is image and native == encoding):
            try:
                data = _encoded(small, encoding, quality)
            except (OSError, ValueError) as error:  # WebP ends at 16,383 pixels a side, JPEG at 65,535
                raise UnimetricError(
                    f"{source}: cannot be stored as {encoding} ({error})", "choose a short_side, or another encoding"
                ) from None
        return data, small.height, small.width

    names = _relative(table.paths)
    kept, skipped = [], []
    offsets, lengths, heights, widths = [], [], [], []
    digest, offset = hashlib.sha256(), 0
    with _atomic(path) as file, closing(_in_order(entry, table.paths, workers)) as results:
        file.write(_MAGIC)
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
                    "version": _VERSION,
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
        file.write(footer + hashlib.sha256(footer).digest() + len(footer).to_bytes(8, "little") + _MAGIC)
        _OPEN.pop(str(path), None)
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
        ("encoding", encoding, _ENCODINGS),
        ("interpolation", interpolation, tuple(_INTERPOLATIONS)),
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


def _in_order(function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int) -> Generator[_Result, None, None]:
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


@contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
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
            with open(handle, "wb", buffering=_CHUNK) as file:
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


# --- reading --------------------------------------------------------------------------------------------------------


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
            or self.encoding not in _ENCODINGS
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
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise UnimetricError(f"{path}: is not a pack", again)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                tail = file.read()
                length = int.from_bytes(tail[32:40], "little")
                payload = size - _TAIL - length - len(_MAGIC)
                if tail[40:] != _MAGIC or payload < 1:
                    raise UnimetricError(f"{path}: is cut short or altered", again)
                file.seek(len(_MAGIC) + payload)
                footer = file.read(length)
        except OSError as error:
            reason = "there is no such pack" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise UnimetricError(f"{path}: {reason}", again) from None
        if hashlib.sha256(footer).digest() != tail[:32]:
            raise UnimetricError(f"{path}: its table is altered", again)
        try:
            content = json.loads(zlib.decompressobj().decompress(footer, 1 << 31))
            if content["version"] > _VERSION:
                raise UnimetricError(f"{path}: was written by a newer Unimetric", "update Unimetric, or pack the dataset again")
            pack = cls(path, content, np.memmap(path, np.uint8, "r", offset=len(_MAGIC), shape=(payload,)))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise UnimetricError(f"{path}: its table cannot be understood ({error})", again) from None
        if verify:
            digest = hashlib.sha256()
            for start in range(0, payload, _CHUNK):
                digest.update(pack._bytes[start : start + _CHUNK].data)
            if digest.hexdigest() != pack.sha256:
                raise UnimetricError(f"{path}: its pictures are altered", again)
        _OPEN[path] = pack
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
        array = np.array(_parse(span.tobytes(), f"{self.path}::{row}")[0])
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
        with closing(_in_order(fill, tasks, workers or _cores())) as counts:
            for count in counts:
                done += count
                if progress is not None:
                    progress(done, len(chosen))
        return pixels, offsets, sizes


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


#: Packs that this process has open, by path.
_OPEN: dict[str, Pack] = {}
