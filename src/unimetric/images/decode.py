"""Decode, shrink and encode one image.

Images are read as the papers read them, by Pillow with `convert("RGB")`, and then turned upright by their EXIF orientation: phones store
photos as the sensor lies. Numpy and Pillow only.
"""

from __future__ import annotations

import errno
import io
import os
import warnings

import numpy as np
from PIL import Image, ImageFile, ImageOps

from unimetric.errors import UnimetricError
from unimetric.images.members import check_member, span_of, split_member
from unimetric.images.regions import Box, file_of, split_box
from unimetric.images.remote import is_remote, read_file, read_range

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
#: Only still images: Pillow would pass an .eps file to Ghostscript, and none of the datasets has any.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
#: Maximum number of pixels of an image: Pillow's limit for a decompression bomb. Defined here so that
#: no other package can disable it.
MOST_PIXELS = 178_956_970
_ORIENTATION = 0x0112
warnings.filterwarnings("ignore", message="Corrupt EXIF data")
# Pillow warns from half of `MOST_PIXELS` on. The last filter of the list yields to those of other packages.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)
_SKIP_HINT = 'fix or remove it, or skip such images with `on_bad_picture = "skip"` or `unimetric pack --skip-bad`'


def load_image(path: str) -> tuple[Image.Image, bytes, str]:
    """Read an image file, or a box in it.

    Returns:
        The RGB image, the bytes of the file, and their format if they can be stored as they are (else "").
    """
    return parse_image(read_bytes(path), path, split_box(path)[1])


def read_bytes(path: str) -> bytes:
    """Read the bytes of an image file, whole if the path has a box.

    A file that cannot be read is an error.
    """
    member = split_member(split_box(path)[0])
    path = file_of(path)
    if is_remote(path):
        return read_file(path) if member is None else check_member(read_range(path, *span_of(member)), member)
    if not os.path.isfile(path):  # checked first, because opening a pipe would block forever
        reason = "is not a file" if os.path.exists(path) else "there is no such image"
        raise UnimetricError(f"{path}: {reason}", _SKIP_HINT)
    try:
        with open(path, "rb") as file:
            if member is None:
                return file.read()
            start, length = span_of(member)
            file.seek(start)
            return check_member(file.read(length), member)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # a lack of resources, not a bad image: it must not be skipped
        raise UnimetricError(f"{path}: cannot be read ({error.strerror})", _SKIP_HINT) from None


def image_size(path: str) -> tuple[int, int] | None:
    """Return width and height from the header of an image file, or None if it cannot be read."""
    if not is_remote(path) and not os.path.isfile(path):
        return None
    try:
        with Image.open(io.BytesIO(read_file(path)) if is_remote(path) else path, formats=FORMATS) as image:
            return image.size
    except Exception:  # decoding the file raises a better error
        return None


def parse_image(
    data: bytes, name: str, box: Box | None = None, *, upright: bool = True, hint: str = _SKIP_HINT
) -> tuple[Image.Image, bytes, str]:
    """Decode an image from bytes, crop it to a box, and turn it upright.

    Args:
        data: Content of the file.
        name: Name for errors.
        box: Box in the stored pixels.
        upright: Whether to turn the image by its EXIF orientation.
        hint: Hint of errors.

    Returns:
        The RGB image, its bytes, and their format if they can be stored as they are (else "").
    """
    if not data:
        raise UnimetricError(f"{name}: is empty", hint)
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        file = image
        if image.width * image.height > MOST_PIXELS:
            raise Image.DecompressionBombError
        native = (image.format or "").lower() if image.mode == "RGB" else ""
        if _is_deep(image):  # before the crop, because a box may be dark
            image = to_rgb(image, name, hint)
        if box is not None:
            image, native = _crop_box(image, box, name), ""
        image = to_rgb(image, name, hint)
        image.load()
        turned = _turn(image, file) if upright else image
        return turned, data, native if turned is image else ""
    except (MemoryError, UnimetricError):
        raise
    except Image.UnidentifiedImageError:
        raise UnimetricError(f"{name}: is not an image", hint) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnimetricError(f"{name}: has more than {MOST_PIXELS // 10**6} megapixels, a decompression bomb", hint) from None
    except Exception as error:  # decoders raise many types for a broken file: OSError, SyntaxError, struct.error, ...
        raise UnimetricError(f"{name}: cannot be decoded ({error})", hint) from None


def to_rgb(image: Image.Image, name: str, hint: str) -> Image.Image:
    """Convert an image to RGB.

    One in RGB is returned unchanged, because a conversion would copy all pixels.

    Args:
        image: Image of any mode.
        name: Name for errors.
        hint: Hint of errors.
    """
    deep, largest = _is_deep(image), 0
    if image.mode == "F":  # Pillow would clip them to 0 ... 255, so that an image of 0 ... 1 is black
        raise UnimetricError(f"{name}: pixels must be integers, got floating-point numbers", f"convert it to 8 bits; {hint}")
    if image.mode.startswith("I"):  # 16-bit gray: Pillow's conversion would clip most of it to white
        pixels = np.asarray(image).clip(0, 65535)
        largest = int(pixels.max())
        image = Image.fromarray((pixels // 256).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors as a direct conversion, without Pillow's warning
    image = image if image.mode == "RGB" else image.convert("RGB")
    if deep and not largest:  # of 16-bit colors, Pillow reads the upper byte
        upper = int(np.asarray(image).max())
        largest = 256 * upper + 255 if upper else 0
    if 0 < largest < 4096:  # values of at most 12 bits would be black or nearly black; the number of bits is not stored
        problem = f"{name}: 16-bit pixels must be up to 65,535, got at most {largest:,}"
        raise UnimetricError(problem, f"convert it to 8 bits, or multiply 12-bit values by 16; {hint}")
    return image


def _is_deep(image: Image.Image) -> bool:
    """Return whether a gray image, or a file that is not loaded, has 16 bits per color."""
    layout = str(image.tile) if isinstance(image, ImageFile.ImageFile) else ""
    return image.mode.startswith("I") or ";16" in layout.replace("BGR;16", "")  # which is 16 bits for all colors


def _turn(image: Image.Image, file: Image.Image) -> Image.Image:
    """Turn an image by the EXIF orientation of its file.

    The pixels of the file are loaded, and Pillow has turned those of a TIFF file already.
    """
    try:
        orientation = file.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data do not make an image unreadable
        return image
    if orientation not in range(2, 9):
        return image
    image.getexif()[_ORIENTATION] = orientation  # conversions may have lost it
    return ImageOps.exif_transpose(image)


def _crop_box(image: Image.Image, box: Box, name: str) -> Image.Image:
    left, top, width, height = box
    if not (width and height) or left + width > image.width or top + height > image.height:
        raise UnimetricError(
            f"{name}: the box must be inside the image of {image.width} x {image.height} pixels, got x={left}, y={top}, "
            f"width={width}, height={height}",
            "correct the box",
        )
    return image.crop((left, top, left + width, top + height))


def shrink(image: Image.Image, short_side: int | None, interpolation: str) -> Image.Image:
    """Resize an image so that its shorter side has at most `short_side` pixels."""
    width, height = image.size
    short = min(width, height)
    if short_side is None or short <= short_side:
        return image
    size = (int(short_side * width / short), int(short_side * height / short))
    return image.resize(size, INTERPOLATIONS[interpolation])  # Pillow's filters antialias


def encode(image: Image.Image, encoding: str, quality: int) -> bytes:
    """Encode an image as `raw`, `jpeg`, `webp` or `png`."""
    if encoding == "raw":
        return image.tobytes()
    out = io.BytesIO()
    if encoding == "jpeg":
        # At quality 90 or more, keep colors at full resolution: fine-grained classes differ by the
        # color of a few pixels.
        image.save(out, "JPEG", quality=quality, subsampling=0 if quality >= 90 else 2)
    elif encoding == "webp":
        image.save(out, "WEBP", quality=quality, method=4)
    else:
        image.save(out, "PNG", compress_level=6)
    return out.getvalue()
