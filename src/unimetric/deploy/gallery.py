"""An open index as the server shows it: originals, thumbnails, columns and a map."""

from __future__ import annotations

import ctypes
import io
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from unimetric.analysis.projection import project
from unimetric.deploy.embedding import crop_center
from unimetric.deploy.index import Index, sample_gallery
from unimetric.errors import NotFound, UnimetricError
from unimetric.images.decode import FORMATS, MOST_PIXELS, parse_image, read_bytes
from unimetric.images.loading import View
from unimetric.images.pack import decode, located, make_thumbnail
from unimetric.images.regions import split_box

#: Formats that every browser shows, and their media types. Others are sent as PNG.
_SHOWN = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
#: Pixels of the longer side of a thumbnail, and bytes of all thumbnails in memory.
_SIDE, _CACHE = 320, 64 << 20
#: Points of the map; rows and values of which the columns are summarized.
_POINTS, _ROWS, _VALUES = 2000, 100_000, 200
#: Images with more pixels are decoded one at a time, and copied by so many rows.
_LARGE, _ROWS_AT_ONCE = 8_000_000, 256
#: Largest ratio of the sides of an upload. Resizing its short side takes memory that grows with it.
_RATIO = 60
_log = logging.getLogger("unimetric")


class TooLarge(UnimetricError):
    """An image has more pixels than allowed."""


class Gallery:
    """An index with thumbnails, a map and summaries of its columns, all for one version of it.

    Args:
        index: Open index.
        embedder: Model of an earlier gallery of the same weights. Defaults to that of the index.
    """

    def __init__(self, index: Index, embedder: Any = None) -> None:
        self.index, self.version, self.count = index, index.facts.version, len(index)
        self.embedder = index.embedder if embedder is None else embedder
        if embedder is None:  # the first pass of a model is slow, so no request waits for it
            self.embedder.embed_images([np.zeros((32, 32, 3), np.uint8)])
        self._thumbnails: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock, self._slow = threading.Lock(), threading.Lock()
        self._users, self._retired = 0, False

    @contextmanager
    def used(self) -> Iterator[Gallery]:
        """Keep the index open, even if another version replaces it meanwhile."""
        with self._lock:
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                last = self._retired and not self._users
            if last:
                self.index.close()

    def retire(self) -> None:
        """Close the index as soon as it is not used."""
        with self.used():
            self._retired = True

    # --- images ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _path(self, id_: str) -> Iterator[str]:
        """Yield the path of an image to read it.

        Only ids of the index become paths, and errors do not show them.
        """
        self.index.fetch([id_])
        try:
            yield self.index.image_path(id_)
        except UnimetricError as error:
            _log.warning("%s", error.message)
            raise NotFound(f"the image of the id `{id_}` cannot be read", "update the index with `unimetric index`") from None

    def read(self, id_: str) -> tuple[bytes, str]:
        """Return an image as bytes that a browser shows, and their media type."""
        with self._path(id_) as path:
            if not located(path):
                data = read_bytes(path)
                kind, box = read_header(data, id_)[0], split_box(path)[1]
                if kind in _SHOWN and box is None:
                    return data, _SHOWN[kind]
                image = parse_image(data, id_, box)[0]
            else:
                image = Image.fromarray(decode(path))
        out = io.BytesIO()
        image.save(out, "PNG", compress_level=1)
        return out.getvalue(), "image/png"

    def thumbnail(self, id_: str) -> bytes:
        """Return a small JPEG file of an image, upright."""
        with self._lock:
            if id_ in self._thumbnails:
                self._thumbnails.move_to_end(id_)
                return self._thumbnails[id_]
        with self._path(id_) as path:
            small = make_thumbnail(path, _SIDE)
        with self._lock:
            self._bytes += len(small) - len(self._thumbnails.get(id_, b""))
            self._thumbnails[id_] = small
            while self._bytes > _CACHE:
                self._bytes -= len(self._thumbnails.popitem(last=False)[1])
        return small

    # --- summaries ---------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> list[dict[str, Any]]:
        """Name and type of each column, with its values if they are few, or its range."""
        with self._slow:
            return self._columns

    @cached_property
    def _columns(self) -> list[dict[str, Any]]:
        kinds = self.index.columns
        values: dict[str, set[Any]] = {name: set() for name in kinds}
        for _, _, columns in islice(self.index.store.scan(), _ROWS // 4096):
            for name, some in columns.items():
                values.setdefault(name, set()).update(value for value in some if value is not None)
        return [_summarize(name, kind, values[name]) for name, kind in kinds.items()]

    @property
    def map(self) -> dict[str, Any]:
        """Points of the map: up to 2,000 images at equal steps, with the name of the projection."""
        with self._slow:
            return self._map

    @cached_property
    def _map(self) -> dict[str, Any]:
        ids, points, columns = sample_gallery(self.index, _POINTS)
        labels = columns.get("label", [None] * len(ids))
        if len(ids) < 2:
            return {"projection": "", "ids": ids, "x": [0.5] * len(ids), "y": [0.5] * len(ids), "labels": labels}
        name, flat = project(points)
        low, high = flat.min(0), flat.max(0)
        unit = ((flat - low) / np.where(high > low, high - low, 1)).round(4)
        return {"projection": name, "ids": ids, "x": unit[:, 0].tolist(), "y": unit[:, 1].tolist(), "labels": labels}

    # --- search ------------------------------------------------------------------------------------------------------

    def stored(self, id_: str) -> np.ndarray:
        """Return the raw embedding (D,) of an image of the index."""
        if self.index.facts.placement.geometry == "poincare":  # the store has no raw embeddings
            with self._path(id_) as path:
                return self.embedder.embed_images([path])[0]
        return self.index.facts.placement.points(self.index.store.vectors([id_]))[0]


def _summarize(name: str, kind: type, values: set[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "type": kind.__name__}
    if kind in (int, float) and values:
        return found | {"low": min(values), "high": max(values)}
    return found | ({"values": sorted(values)} if len(values) <= _VALUES else {})


def read_header(data: bytes, name: str, most: int = MOST_PIXELS) -> tuple[str, bool]:
    """Return the format of an image, and whether it is large, from its header.

    Args:
        data: Content of the file.
        name: Name for errors.
        most: Largest number of pixels.

    Raises:
        UnimetricError: It is not an image, or has too many pixels (`TooLarge`).
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height, kind = image.width, image.height, image.format or ""
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise TooLarge(f"{name}: has more than {most / 1e6:g} million pixels", "send a smaller one") from None
    except Exception:  # decoders raise many types for a broken file
        raise UnimetricError(f"{name}: is not an image", f"send one of {', '.join(FORMATS)}") from None
    if width * height > most:
        raise TooLarge(f"{name}: has {width} x {height} pixels, more than {most / 1e6:g} million", "send a smaller one")
    return kind, width * height > _LARGE


_one_large = threading.RLock()


def decode_upload(data: bytes, name: str, most: int) -> np.ndarray:
    """Return the pixels (H, W, 3) of an upload. Its size is checked before it is decoded.

    Args:
        data: Content of the file.
        name: Name for errors.
        most: Largest number of pixels.
    """
    kind, large = read_header(data, name, most)
    if kind == "JPEG2000":  # its decoder takes four times the memory of others
        read_header(data, name, most // 4)
    with _turn(large):
        try:
            image = parse_image(data, name, hint="send another one")[0]
            if max(image.size) > _RATIO * min(image.size):
                raise UnimetricError(f"{name}: an image of {image.width} x {image.height} pixels is too narrow", "crop it first")
        except UnimetricError as error:
            if large:
                error.__traceback__ = error.__context__ = None  # they hold the image
                _release_memory()
            raise
        pixels = np.empty((image.height, image.width, 3), np.uint8)
        for top in range(0, image.height, _ROWS_AT_ONCE):  # a whole image would be copied twice on its way to numpy
            bottom = min(top + _ROWS_AT_ONCE, image.height)
            pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
        return pixels


def crop_upload(data: bytes, view: View, most: int) -> Tensor:
    """Return the crop of an upload for the model.

    The memory of a large image goes back to the system.

    Args:
        data: Content of the file.
        view: View of the model.
        most: Largest number of pixels.
    """
    large = read_header(data, "the upload", most)[1]
    with _turn(large):
        crop = crop_center(decode_upload(data, "the upload", most), view, "the upload")
        if large:
            _release_memory()
        return crop


def _turn(large: bool) -> AbstractContextManager[object]:
    """Return what bounds the memory of all threads: they hold at most one large image."""
    return _one_large if large else nullcontext()


def _release_memory() -> None:
    """Return freed memory to the system.

    The C library would keep up to 64 MiB of it per thread.
    """
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
