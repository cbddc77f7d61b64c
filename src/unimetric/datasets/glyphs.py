"""The default dataset, without a download: characters in the fonts of matplotlib.

The characters are from eight Unicode blocks.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from unimetric.arguments import Range
from unimetric.errors import UnimetricError, closest
from unimetric.files import cache_folder
from unimetric.images.pack import Pack
from unimetric.images.packing import write
from unimetric.images.table import Table

_RULES = 1  # increase it if the drawings change: it is part of the name of the cached file
_BLOCKS = {
    "latin": range(0x0021, 0x0250),
    "greek": range(0x0370, 0x0400),
    "cyrillic": range(0x0400, 0x0530),
    "armenian": range(0x0530, 0x0590),
    "georgian": range(0x10A0, 0x1100),
    "arrows": range(0x2190, 0x2200),
    "operators": range(0x2200, 0x2300),
    "shapes": range(0x25A0, 0x2600),
}
_LEAST = 8  # minimum number of fonts with a character, and of images of a class
_CANVAS, _EM, _BASELINE = 96, 64, 70  # pixels of a drawing before it is rotated and downscaled
# The Adobe list maps these names to characters that look the same (ohm, increment), or to none.
_NAMED = {"Omega": 0x03A9, "Delta": 0x0394, "dotlessj": 0x0237}

Drawings = dict[int, dict[str, np.ndarray]]  # character -> font -> (96, 96) uint8, white on black


def glyphs(
    *,
    blocks: str | Annotated[list[str], Range(1)] = "all",
    size: Annotated[int, Range(8, 96)] = 32,
    jitter: Annotated[float, Range(0, 4)] = 1.0,
) -> Table:
    """Characters as classes, fonts as their instances, and Unicode blocks as datasets.

    A font has a character if its glyph has the name of that character and its drawing is nonempty
    and fits the canvas. (Computer Modern stores other glyphs under Latin codes.) A character in
    fewer than 8 fonts is skipped. A drawing that is pixel-identical in two fonts counts once. A
    class with fewer than 8 drawings repeats each as often as needed, with different rotation, shift
    and scale.

    Look-alikes form one class. Two characters look alike in a font if their drawings nowhere differ
    by a patch of 2 x 2 pixels. They are drawn at 64 pixels per em, centered and on the same
    baseline. A character is skipped if it looks like an earlier one (in the order of the blocks,
    then of the codes) in at least half of the fonts that have both. So A is Latin, and neither
    Greek nor Cyrillic.

    Half of the classes of each block are for training: every other one in the order of a hash, so
    that both halves are similar. Images are drawn once, dark on white, into a pack in the folder
    `UNIMETRIC_CACHE` (default: the cache folder of the user). The pack is deterministic.

    Reference:
        A dataset of Unimetric; many classes with few drawings each, as in Omniglot (Lake et al.,
        Science 2015).

    Args:
        blocks: `all`, one block or a list of blocks: `latin greek cyrillic armenian georgian arrows
            operators shapes`.
        size: Side of the images in pixels, at most 96.
        jitter: Strength of rotation (at 1, up to 8 degrees), scaling (10 %) and shift (5 % of the
            side). 0 disables them.
    """
    chosen = _list_blocks(blocks)
    for block in chosen:
        if block not in _BLOCKS:
            raise UnimetricError(f"glyphs has no block `{block}`", closest(block, _BLOCKS))
    path = _cached(size, jitter)
    try:
        table = Pack.open(path).table
    except UnimetricError:  # missing or broken: draw it again
        hint = "set UNIMETRIC_CACHE to a writable folder with about 50 MB of free space"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # fail before drawing
            table = draw(path, size=size, jitter=jitter).table
        except OSError as error:
            raise UnimetricError(f"{path.parent}: cannot be created ({error.strerror})", hint) from None
        except UnimetricError as error:
            raise UnimetricError(error.message, hint) from None
    return _only(table, [block for block in _BLOCKS if block in chosen])


def _list_blocks(blocks: str | list[str]) -> list[str]:
    if blocks == "all":
        return list(_BLOCKS)
    if isinstance(blocks, list | tuple):
        return [str(block) for block in blocks]
    return [str(blocks)]


def _cached(size: int, jitter: float) -> Path:
    """Return the path of the cached pack.

    Its name contains the versions of the drawing libraries, because another version may draw a pixel differently.
    """
    drawn_by = (
        [str(_RULES), str(size), str(float(jitter))]
        + [version(name) for name in ("pillow", "matplotlib")]
        + [features.version("freetype2")]
    )
    return cache_folder() / f"glyphs-{_RULES}-{hashlib.sha256(' '.join(map(str, drawn_by)).encode()).hexdigest()[:12]}.pack"


def _only(table: Table, blocks: list[str]) -> Table:
    """Return the rows of some blocks, with classes and sources renumbered."""
    sources = [table.source_names.index(block) for block in blocks]
    part = table.take(np.isin(table.source, sources))
    classes, labels = np.unique(part.labels, return_inverse=True)
    return replace(
        part,
        labels=labels,
        class_names=tuple(table.class_names[number] for number in classes),
        source=np.searchsorted(sources, part.source),
        source_names=tuple(blocks),
    )


def draw(path: Path, *, size: int, jitter: float) -> Pack:
    """Draw all images into a pack.

    Args:
        path: File to write.
        size: Side of the images in pixels.
        jitter: Strength of rotation, scaling and shift.
    """
    drawings = _drawings()
    images: dict[str, tuple[np.ndarray, str]] = {}
    names, labels, source, train = [], [], [], []
    alike = look_alikes(drawings)
    block_of = {character: number for number, block in enumerate(_BLOCKS.values()) for character in block}
    classes = [character for character in drawings if character not in alike]
    trained = {character for number in range(len(_BLOCKS)) for character in _halves([c for c in classes if block_of[c] == number])}
    for label, character in enumerate(classes):
        for face, turn in instances(drawings[character], jitter):
            name = f"{list(_BLOCKS)[block_of[character]]}/U+{character:04X}/{face}-{turn}"
            images[name] = (drawings[character][face], f"{character} {face} {turn}")
            labels.append(label)
            source.append(block_of[character])
            train.append(character in trained)
        names.append(f"U+{character:04X} {unicodedata.name(chr(character))}")
    table = Table(
        paths=tuple(images),
        labels=np.array(labels),
        class_names=tuple(names),
        train=np.array(train),
        source=np.array(source),
        source_names=tuple(_BLOCKS),
    )
    return write(path, table, short_side=None, encoding="raw", workers=1, read=lambda name: _jittered(*images[name], size, jitter))


def instances(by_face: dict[str, np.ndarray], jitter: float) -> list[tuple[str, int]]:
    """Return the images of a class as (face, turn).

    Fonts that repeat the drawing of an earlier one are skipped, and there are enough turns for 8
    images.

    Args:
        by_face: Drawing of each font.
        jitter: Strength of the jitter. At 0, all turns would be equal, so there is one.
    """
    first: dict[bytes, str] = {}
    for face, drawing in by_face.items():
        first.setdefault(drawing.tobytes(), face)
    turns = math.ceil(_LEAST / len(first)) if jitter else 1
    return [(face, turn) for turn in range(turns) for face in first.values()]


def _halves(characters: list[int]) -> list[int]:
    """Return every other character in the order of a hash."""
    return sorted(characters, key=lambda character: hashlib.sha256(str(character).encode()).digest())[::2]


def _drawings() -> Drawings:
    """Draw every character that at least 8 fonts have, in the order of the blocks."""
    import matplotlib
    from fontTools.ttLib import TTFont

    wanted = [character for block in _BLOCKS.values() for character in block]
    known = set(wanted)
    held: dict[int, dict[str, str]] = {character: {} for character in wanted}
    files = {}
    for file in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")):
        if file.name.startswith("LastResort"):  # this font draws the name of the block for every character
            continue
        files[file.stem] = file
        for code, name in sorted(TTFont(file, lazy=True).getBestCmap().items()):
            character = _character(name)
            if character in known:
                held[character].setdefault(file.stem, chr(code))
    drawings: Drawings = {character: {} for character in wanted}
    for face, file in files.items():
        # The basic layout draws one glyph per code, whatever shaping library is installed.
        font = ImageFont.truetype(file, _EM, layout_engine=ImageFont.Layout.BASIC)
        for character in wanted:
            if len(held[character]) >= _LEAST and face in held[character]:
                drawing = _drawing(font, held[character][face])
                if drawing is not None:
                    drawings[character][face] = drawing
    return {character: by_face for character, by_face in drawings.items() if len(by_face) >= _LEAST}


def _character(name: str) -> int | None:
    """Return the character that the name of a glyph denotes."""
    from fontTools.agl import toUnicode

    text = toUnicode(name)
    return _NAMED.get(name, ord(text) if len(text) == 1 else None)


def _drawing(font: ImageFont.FreeTypeFont, text: str) -> np.ndarray | None:
    """Draw a glyph on the baseline, horizontally centered.

    Returns None if the glyph is empty or too large.
    """
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text, anchor="ls"))
    if right - left > _CANVAS or top + _BASELINE < 0 or bottom + _BASELINE > _CANVAS:
        return None
    image = Image.new("L", (_CANVAS, _CANVAS))
    ImageDraw.Draw(image).text(((_CANVAS - right - left) // 2, _BASELINE), text, fill=255, font=font, anchor="ls")
    drawing = np.asarray(image)
    return drawing if drawing.max() > 127 else None


def _jittered(drawing: np.ndarray, key: str, size: int, jitter: float) -> np.ndarray:
    """Rotate, scale and shift a drawing by the hash of the key, and downscale it.

    The image is dark on white.

    Shape:
        drawing (96, 96) uint8 -> image (S, S) uint8
    """
    turn, scale, across, down = (np.frombuffer(hashlib.sha256(key.encode()).digest(), "<u4")[:4] / 2**31 - 1.0) * jitter
    angle, scale = math.radians(8 * turn), 1 + 0.1 * scale
    # The matrix maps output to input coordinates about both centers, with four samples per pixel.
    step = _CANVAS / (2 * size)
    a, b = step * math.cos(angle) / scale, step * math.sin(angle) / scale
    x, y = size * (1 + 0.1 * across), size * (1 + 0.1 * down)
    matrix = (a, b, _CANVAS / 2 - a * x - b * y, -b, a, _CANVAS / 2 + b * x - a * y)
    sampled = Image.fromarray(drawing).transform((2 * size, 2 * size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return 255 - np.asarray(sampled.reduce(2))


def look_alikes(drawings: Drawings) -> dict[int, int]:
    """Map each character that looks like an earlier one to that one.

    Args:
        drawings: Drawing of each character in each font, in order of precedence.
    """
    characters = list(drawings)
    number = {character: row for row, character in enumerate(characters)}
    both = np.zeros((len(characters), len(characters)), np.int16)
    same = np.zeros_like(both)
    for face in sorted({face for by_face in drawings.values() for face in by_face}):
        rows = np.array([number[character] for character, by_face in drawings.items() if face in by_face])
        ink = np.stack([drawings[characters[row]][face] for row in rows])
        both[np.ix_(rows, rows)] += 1
        # Most pairs are dissimilar. A comparison at 16 x 16 pixels leaves a few percent to compare in full.
        coarse = ink.reshape(len(rows), 16, _CANVAS // 16, 16, _CANVAS // 16).mean((2, 4), dtype=np.float32).reshape(len(rows), -1)
        coarse /= np.linalg.norm(coarse, axis=1, keepdims=True)
        first, second = np.nonzero(np.triu(coarse @ coarse.T > 0.95, 1))
        ink = ink > 127
        for start in range(0, len(first), 512):
            one, other = first[start : start + 512], second[start : start + 512]
            differ = ink[one] ^ ink[other]
            differ = differ[:, 1:] & differ[:, :-1]
            alike = ~(differ[:, :, 1:] & differ[:, :, :-1]).any((1, 2))
            same[rows[one[alike]], rows[other[alike]]] += 1
    found: dict[int, int] = {}
    for row, character in enumerate(characters):
        for earlier in np.flatnonzero((2 * same[:row, row] >= both[:row, row]) & (same[:row, row] > 0)):
            if characters[earlier] not in found:
                found[character] = characters[earlier]
                break
    return found
