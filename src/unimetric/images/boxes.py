"""Draw the crop box and the color jitter of each image.

A draw depends on (seed, epoch, view, row) only, so a resumed run gets the same crops as an uninterrupted one, for any
number of workers or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from unimetric.images.recipe import Recipe


@dataclass(frozen=True)
class Draws:
    """What happens to each picture of a batch; every field is an array of B rows.

    Either the box is cut out of the picture and resized to the square (`crop_first`), or the whole picture is resized to (`height`,
    `width`) and the square is cut out of that.

    Args:
        height, width: size of the whole picture before cropping.
        top, left, box_height, box_width: the box.
        flip: mirror image.
        gray: no colour.
        brightness, contrast, saturation: factors.
        hue: turn of the colour circle, in turns.
        crop_first: which of the two, for the whole batch.
    """

    height: np.ndarray
    width: np.ndarray
    top: np.ndarray
    left: np.ndarray
    box_height: np.ndarray
    box_width: np.ndarray
    flip: np.ndarray
    gray: np.ndarray
    brightness: np.ndarray
    contrast: np.ndarray
    saturation: np.ndarray
    hue: np.ndarray
    crop_first: bool

    def rows(self, part: slice) -> Draws:
        """The draws of some of the pictures."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Draws(**{key: value if key == "crop_first" else value[part] for key, value in values.items()})


def _uniform(count: int, rows: np.ndarray, *keys: int | np.ndarray) -> np.ndarray:
    """(B, count) numbers in [0, 1) from a hash of the keys, each one for all or one a row, and each row's number (SplitMix64)."""
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for key in keys:
            state = _mix(state + (key.astype(np.uint64) if isinstance(key, np.ndarray) else np.uint64(key & 0xFFFFFFFFFFFFFFFF)))
        mixed = _mix(state + rows.astype(np.uint64))[:, None] + np.arange(count, dtype=np.uint64)[None]
        return (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_TRIES = 10  # torchvision's number of attempts at a random resized crop


def random_draws(recipe: Recipe, sizes: np.ndarray, rows: np.ndarray, *, seed: int, epoch: int, view: int | np.ndarray = 0) -> Draws:
    """Random crops and colours.

    Args:
        recipe: the transform.
        sizes: (B, 2) height and width of each picture.
        rows: (B,) row of each picture in its table.
        seed, epoch, view: what else the dice depend on.
    """
    dice = _uniform(2 * _TRIES + 8, rows, seed, epoch, view)
    height, width = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    if recipe.scale is None:
        height, width = _resized(height, width, recipe.resize)
        box_height = box_width = np.full(len(rows), float(recipe.size))
    else:
        box_height, box_width = _random_box(recipe, height, width, dice)
    place = dice[:, 2 * _TRIES :]
    jitter = 1 + recipe.jitter * (2 * place[:, 4:8] - 1)
    return Draws(
        height=height,
        width=width,
        top=np.floor(place[:, 0] * (height - box_height + 1)),
        left=np.floor(place[:, 1] * (width - box_width + 1)),
        box_height=box_height,
        box_width=box_width,
        flip=place[:, 2] < recipe.flip,
        gray=place[:, 3] < recipe.grayscale,
        brightness=jitter[:, 0],
        contrast=jitter[:, 1],
        saturation=jitter[:, 2],
        hue=jitter[:, 3] - 1,
        crop_first=recipe.scale is not None,
    )


def _random_box(recipe: Recipe, height: np.ndarray, width: np.ndarray, dice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """torchvision's RandomResizedCrop: the first of ten attempts that fits, otherwise the largest box of an allowed shape."""
    low, high = recipe.scale or (1.0, 1.0)
    area = (height * width)[:, None] * (low + (high - low) * dice[:, :_TRIES])
    narrow, wide = recipe.ratio
    ratio = np.exp(np.log(narrow) + (np.log(wide) - np.log(narrow)) * dice[:, _TRIES : 2 * _TRIES])
    box_width, box_height = np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))
    fits = (box_width >= 1) & (box_height >= 1) & (box_width <= width[:, None]) & (box_height <= height[:, None])
    first, none = fits.argmax(1)[:, None], ~fits.any(1)
    shape = width / height
    return (
        np.where(none, np.where(shape < narrow, np.round(width / narrow), height), np.take_along_axis(box_height, first, 1)[:, 0]),
        np.where(none, np.where(shape > wide, np.round(height * wide), width), np.take_along_axis(box_width, first, 1)[:, 0]),
    )


def center_draws(recipe: Recipe, sizes: np.ndarray) -> Draws:
    """The centre of each picture, after its short side is resized."""
    height, width = _resized(sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64), recipe.resize)
    count = len(sizes)
    side, one, none = np.full(count, float(recipe.size)), np.ones(count), np.zeros(count, bool)
    return Draws(
        height=height,
        width=width,
        top=_middle(height, side),
        left=_middle(width, side),
        box_height=side,
        box_width=side,
        flip=none,
        gray=none,
        brightness=one,
        contrast=one,
        saturation=one,
        hue=np.zeros(count),
        crop_first=False,
    )


def _middle(length: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Where torchvision's CenterCrop begins: what is too short is padded, by less before than after it."""
    return np.where(length < side, -((side - length) // 2), np.round((length - side) / 2))


def _resized(height: np.ndarray, width: np.ndarray, short: int) -> tuple[np.ndarray, np.ndarray]:
    least = np.minimum(height, width)  # torchvision cuts the long side's fraction off
    return np.floor(height * short / least), np.floor(width * short / least)
