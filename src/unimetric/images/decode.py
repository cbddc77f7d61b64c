"""Decode, shrink and encode one image.

Images are read as the papers read them: by Pillow, with `convert("RGB")`, ignoring the EXIF orientation. Numpy and Pillow only.
"""

from __future__ import annotations

import errno
import io
import os

import numpy as np
from PIL import Image

from unimetric.errors import UnimetricError

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# Only still pictures: Pillow would hand an .eps to Ghostscript, and none of the datasets has any.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
#: The most pixels that a picture may have, Pillow's own limit for a decompression bomb; here so that nobody can switch it off from afar.
MOST_PIXELS = 178_956_970
_SKIP_HINT = 'mend or remove it, or leave such pictures out with `on_bad_picture = "skip"`, or `unimetric pack --skip-bad`'


def load_image(path: str) -> tuple[Image.Image, bytes, str]:
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
    return parse_image(data, path)


def parse_image(data: bytes, name: str) -> tuple[Image.Image, bytes, str]:
    """Decode an image. Returns it as RGB, its bytes, and their format if they can be stored as they are (else nothing)."""
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


def shrink(image: Image.Image, short_side: int | None, interpolation: str) -> Image.Image:
    """Resize an image so that its shorter side has at most so many pixels."""
    width, height = image.size
    short = min(width, height)
    if short_side is None or short <= short_side:
        return image
    size = (int(short_side * width / short), int(short_side * height / short))
    return image.resize(size, INTERPOLATIONS[interpolation])  # Pillow's filters widen as the picture shrinks: antialiased


def encode(image: Image.Image, encoding: str, quality: int) -> bytes:
    """Encode an image as `raw`, `jpeg`, `webp` or `png`."""
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
