"""Draw the crop box and the color jitter of each image.

A draw depends on (seed, epoch, view, row) only, so a resumed run gets the same crops as an uninterrupted one, for any
number of workers or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unimetric.images.recipe import Recipe


@dataclass(frozen=True)
class Draws:
    """Random choices for each image of a batch. Every field is an array of B rows.

    With `crop_first`, the box is cropped from the image and resized to the output size. Otherwise,
    the whole image is resized to (`height`, `width`), and the box is cropped from the result.

    Args:
        height, width: Size of the whole image before cropping.
        top, left, box_height, box_width: Position and size of the box.
        flip: Whether to mirror horizontally.
        gray: Whether to convert to grayscale.
        brightness, contrast, saturation: Factors.
        hue: Hue rotation, in turns.
        crop_first: Whether to crop before resizing, for the whole batch.
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


def _uniform(count: int, rows: np.ndarray, *keys: int | np.ndarray) -> np.ndarray:
    """Return (B, count) numbers in [0, 1) from a SplitMix64 hash of keys and row numbers.

    A key is one value for all rows, or one value per row.
    """
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for key in keys:
            integer = key.astype(np.uint64) if isinstance(key, np.ndarray) else np.uint64(key & 0xFFFFFFFFFFFFFFFF)
            state = _mix(state + integer)
        mixed = _mix(state + rows.astype(np.uint64))[:, None] + np.arange(count, dtype=np.uint64)[None]
        return (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_TRIES = 10  # number of attempts of torchvision's RandomResizedCrop


def random_draws(recipe: Recipe, sizes: np.ndarray, rows: np.ndarray, *, seed: int, epoch: int, view: int | np.ndarray = 0) -> Draws:
    """Draw random crop boxes, flips and color jitter.

    Args:
        recipe: Transform.
        sizes: (B, 2) height and width of each image.
        rows: (B,) row of each image in its table.
        seed, epoch, view: Other keys of the random numbers.
    """
    numbers = _uniform(2 * _TRIES + 8, rows, seed, epoch, view)
    height, width = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    if recipe.scale is None:
        height, width = _resized(height, width, recipe.resize)
        box_height = box_width = np.full(len(rows), float(recipe.size))
    else:
        box_height, box_width = _random_box(recipe, height, width, numbers)
    rest = numbers[:, 2 * _TRIES :]
    jitter = 1 + recipe.jitter * (2 * rest[:, 4:8] - 1)
    return Draws(
        height=height,
        width=width,
        top=np.floor(rest[:, 0] * (height - box_height + 1)),
        left=np.floor(rest[:, 1] * (width - box_width + 1)),
        box_height=box_height,
        box_width=box_width,
        flip=rest[:, 2] < recipe.flip,
        gray=rest[:, 3] < recipe.grayscale,
        brightness=jitter[:, 0],
        contrast=jitter[:, 1],
        saturation=jitter[:, 2],
        hue=jitter[:, 3] - 1,
        crop_first=recipe.scale is not None,
    )


def _random_box(recipe: Recipe, height: np.ndarray, width: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the box size of torchvision's RandomResizedCrop.

    It is the first of ten attempts that fits, or else the largest box of an allowed shape.
    """
    low, high = recipe.scale or (1.0, 1.0)
    area = (height * width)[:, None] * (low + (high - low) * numbers[:, :_TRIES])
    narrow, wide = recipe.ratio
    ratio = np.exp(np.log(narrow) + (np.log(wide) - np.log(narrow)) * numbers[:, _TRIES : 2 * _TRIES])
    box_width, box_height = np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))
    fits = (box_width >= 1) & (box_height >= 1) & (box_width <= width[:, None]) & (box_height <= height[:, None])
    first, none = fits.argmax(1)[:, None], ~fits.any(1)
    shape = width / height
    largest_height = np.where(shape < narrow, np.round(width / narrow), height)
    largest_width = np.where(shape > wide, np.round(height * wide), width)
    return (
        np.where(none, largest_height, np.take_along_axis(box_height, first, 1)[:, 0]),
        np.where(none, largest_width, np.take_along_axis(box_width, first, 1)[:, 0]),
    )


def center_draws(recipe: Recipe, sizes: np.ndarray) -> Draws:
    """Return the center crop of each image, after its short side is resized."""
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
    """Return the start of torchvision's CenterCrop.

    Short images are padded, by less before than after.
    """
    return np.where(length < side, -((side - length) // 2), np.round((length - side) / 2))


def _resized(height: np.ndarray, width: np.ndarray, short: int) -> tuple[np.ndarray, np.ndarray]:
    least = np.minimum(height, width)  # torchvision rounds the long side down
    return np.floor(height * short / least), np.floor(width * short / least)
