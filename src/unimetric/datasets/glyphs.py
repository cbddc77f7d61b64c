"""The embedded default: characters of eight blocks, as the typefaces that matplotlib ships draw them. No download."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import unicodedata
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from unimetric.errors import UnimetricError, closest
from unimetric.images.pack import Pack
from unimetric.images.packing import write
from unimetric.images.table import Table

_RULES = 1  # raise it when anything below changes what is drawn: the cached file's name depends on it
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
_LEAST = 8  # faces that hold a character, and pictures of a class
_CANVAS, _EM, _BASELINE = 96, 64, 70  # pixels of a drawing before it is turned and shrunk
# The Adobe list gives these names to characters that only look the same (ohm, increment), or to none.
_NAMED = {"Omega": 0x03A9, "Delta": 0x0394, "dotlessj": 0x0237}

Drawings = dict[int, dict[str, np.ndarray]]  # character -> face -> (96, 96) uint8, ink is light


def glyphs(*, blocks: str | list[str] = "all", size: int = 32, jitter: float = 1.0) -> Table:
    """Characters as classes, typefaces as their instances, Unicode blocks as datasets of their own; our own dataset, after Omniglot's idea
    (Lake et al., Science 2015) of many classes with few drawings each.

    A face holds a character if its glyph bears that character's name (Computer Modern keeps other glyphs under Latin codes) and has ink
    that fits the canvas. A character that fewer than 8 faces hold is left out. A drawing that two faces share to the last pixel counts
    once. A class with fewer than 8 drawings has each of them as often as it takes, turned, shifted and scaled differently.

    Look-alikes are one class: two characters look alike in a face if their drawings, 64 pixels to the em, centred and on the same
    baseline, differ nowhere by a patch of 2 x 2 pixels; a character that looks like an earlier one (in the order of the blocks, then of the
    codes) in at least half of the faces that hold both is left out. So A is Latin, and neither Greek nor Cyrillic.

    Half of each block's classes are for training, every other one in the order of a hash, so that both halves are alike.
    Drawn once into a pack in the folder `UNIMETRIC_CACHE` (default: the user's cache folder), the same bytes every time, dark on white.

    Args:
        blocks: `all`, one block or a list of blocks: `latin greek cyrillic armenian georgian arrows operators shapes`.
        size: pixels a side, at most 96.
        jitter: how much drawings are turned (at 1, up to 8 degrees), scaled (10 %) and shifted (5 % of the side); 0 for not at all.
    """
    chosen = list(_BLOCKS) if blocks == "all" else [str(block) for block in blocks] if isinstance(blocks, list | tuple) else [str(blocks)]
    for block in chosen:
        if block not in _BLOCKS:
            raise UnimetricError(f"glyphs has no block `{block}`", closest(block, _BLOCKS))
    if not chosen:
        raise UnimetricError("glyphs has no pictures without a block", 'write `blocks="all"`')
    if not 8 <= size <= _CANVAS or not 0 <= jitter <= 4:
        raise UnimetricError(f"glyphs(size={size}, jitter={jitter}) is out of range", f"size is 8 to {_CANVAS}, jitter 0 to 4")
    path = _cached(size, jitter)
    try:
        table = Pack.open(path).table
    except UnimetricError:  # not there yet, or broken: drawn anew
        hint = "set UNIMETRIC_CACHE to a folder that can be written to, with room for about 50 MB"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # now, rather than after all is drawn
            table = draw(path, size=size, jitter=jitter).table
        except OSError as error:
            raise UnimetricError(f"{path.parent}: cannot be made ({error.strerror})", hint) from None
        except UnimetricError as error:
            raise UnimetricError(error.message, hint) from None
    return _only(table, [block for block in _BLOCKS if block in chosen])


def _cached(size: int, jitter: float) -> Path:
    """Where the drawings lie. What draws them is part of the name: another version of it may draw a pixel differently."""
    if sys.platform == "darwin":
        system = "~/Library/Caches"
    elif sys.platform == "win32":
        system = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    else:
        system = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("UNIMETRIC_CACHE") or os.path.join(system, "unimetric")
    drawn_by = (
        [str(_RULES), str(size), str(float(jitter))]
        + [version(name) for name in ("pillow", "matplotlib")]
        + [features.version("freetype2")]
    )
    return Path(folder).expanduser() / f"glyphs-{_RULES}-{hashlib.sha256(' '.join(map(str, drawn_by)).encode()).hexdigest()[:12]}.pack"


def _only(table: Table, blocks: list[str]) -> Table:
    """The rows of some blocks, with classes and sources numbered anew."""
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
    """Draw everything into a pack.

    Args:
        path: the file to write.
        size: pixels a side.
        jitter: how much drawings are turned, scaled and shifted.
    """
    drawings = _drawings()
    pictures: dict[str, tuple[np.ndarray, str]] = {}
    names, labels, source, train = [], [], [], []
    alike = look_alikes(drawings)
    block_of = {character: number for number, block in enumerate(_BLOCKS.values()) for character in block}
    classes = [character for character in drawings if character not in alike]
    trained = {character for number in range(len(_BLOCKS)) for character in _halves([c for c in classes if block_of[c] == number])}
    for label, character in enumerate(classes):
        for face, turn in instances(drawings[character], jitter):
            name = f"{list(_BLOCKS)[block_of[character]]}/U+{character:04X}/{face}-{turn}"
            pictures[name] = (drawings[character][face], f"{character} {face} {turn}")
            labels.append(label)
            source.append(block_of[character])
            train.append(character in trained)
        names.append(f"U+{character:04X} {unicodedata.name(chr(character))}")
    table = Table(
        paths=tuple(pictures),
        labels=np.array(labels),
        class_names=tuple(names),
        train=np.array(train),
        source=np.array(source),
        source_names=tuple(_BLOCKS),
    )
    return write(path, table, short_side=None, encoding="raw", workers=1, read=lambda name: _jittered(*pictures[name], size, jitter))


def instances(by_face: dict[str, np.ndarray], jitter: float) -> list[tuple[str, int]]:
    """The pictures of a class: (face, turn), without faces that draw what an earlier one draws, and with turns enough to make 8.

    Args:
        by_face: what each face draws.
        jitter: without it all turns would be the same, so there is one.
    """
    first: dict[bytes, str] = {}
    for face, drawing in by_face.items():
        first.setdefault(drawing.tobytes(), face)
    turns = math.ceil(_LEAST / len(first)) if jitter else 1
    return [(face, turn) for turn in range(turns) for face in first.values()]


def _halves(characters: list[int]) -> list[int]:
    """Every other character in the order of a hash."""
    return sorted(characters, key=lambda character: hashlib.sha256(str(character).encode()).digest())[::2]


def _drawings() -> Drawings:
    """Every character of the blocks that at least 8 faces hold, in the order of the blocks, as each face draws it."""
    import matplotlib
    from fontTools.ttLib import TTFont

    wanted = [character for block in _BLOCKS.values() for character in block]
    known = set(wanted)
    held: dict[int, dict[str, str]] = {character: {} for character in wanted}
    files = {}
    for file in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")):
        if file.name.startswith("LastResort"):  # it draws the name of the block for every character there is
            continue
        files[file.stem] = file
        for code, name in sorted(TTFont(file, lazy=True).getBestCmap().items()):
            character = _character(name)
            if character in known:
                held[character].setdefault(file.stem, chr(code))
    drawings: Drawings = {character: {} for character in wanted}
    for face, file in files.items():
        # The basic layout: one glyph for one code, whatever shaping library is at hand.
        font = ImageFont.truetype(file, _EM, layout_engine=ImageFont.Layout.BASIC)
        for character in wanted:
            if len(held[character]) >= _LEAST and face in held[character]:
                drawing = _drawing(font, held[character][face])
                if drawing is not None:
                    drawings[character][face] = drawing
    return {character: by_face for character, by_face in drawings.items() if len(by_face) >= _LEAST}


def _character(name: str) -> int | None:
    """The character that a glyph's name stands for."""
    from fontTools.agl import toUnicode

    text = toUnicode(name)
    return _NAMED.get(name, ord(text) if len(text) == 1 else None)


def _drawing(font: ImageFont.FreeTypeFont, text: str) -> np.ndarray | None:
    """A glyph, centred by its ink and on the baseline; nothing if it has no ink, or not enough room."""
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text, anchor="ls"))
    if right - left > _CANVAS or top + _BASELINE < 0 or bottom + _BASELINE > _CANVAS:
        return None
    image = Image.new("L", (_CANVAS, _CANVAS))
    ImageDraw.Draw(image).text(((_CANVAS - right - left) // 2, _BASELINE), text, fill=255, font=font, anchor="ls")
    drawing = np.asarray(image)
    return drawing if drawing.max() > 127 else None


def _jittered(drawing: np.ndarray, key: str, size: int, jitter: float) -> np.ndarray:
    """Turned, scaled and shifted by what the key's hash says, shrunk to its size, dark on white; (S, S) uint8."""
    turn, scale, across, down = (np.frombuffer(hashlib.sha256(key.encode()).digest(), "<u4")[:4] / 2**31 - 1.0) * jitter
    angle, scale = math.radians(8 * turn), 1 + 0.1 * scale
    # The drawing is sampled four times for each pixel of the picture: out to in, about the centre of both.
    step = _CANVAS / (2 * size)
    a, b = step * math.cos(angle) / scale, step * math.sin(angle) / scale
    x, y = size * (1 + 0.1 * across), size * (1 + 0.1 * down)
    matrix = (a, b, _CANVAS / 2 - a * x - b * y, -b, a, _CANVAS / 2 + b * x - a * y)
    sampled = Image.fromarray(drawing).transform((2 * size, 2 * size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return 255 - np.asarray(sampled.reduce(2))


def look_alikes(drawings: Drawings) -> dict[int, int]:
    """Each character that looks like an earlier one, and that one.

    Args:
        drawings: what each face draws for each character, in the order in which characters take precedence.
    """
    characters = list(drawings)
    number = {character: row for row, character in enumerate(characters)}
    both = np.zeros((len(characters), len(characters)), np.int16)
    same = np.zeros_like(both)
    for face in sorted({face for by_face in drawings.values() for face in by_face}):
        rows = np.array([number[character] for character, by_face in drawings.items() if face in by_face])
        ink = np.stack([drawings[characters[row]][face] for row in rows])
        both[np.ix_(rows, rows)] += 1
        # Most pairs are nothing like each other: a glance from afar, at 16 x 16 pixels, leaves a few in a hundred to look at closely.
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
