"""Resample the crop boxes of a whole batch and jitter colors, or crop one image.

A batch is resampled at once. Single images are cropped in a loading worker.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from unimetric.images.boxes import Draws, center_draws
from unimetric.images.decode import MOST_PIXELS
from unimetric.images.recipe import Recipe

#: Without these instructions, torchvision resizes with bilinear filters in float32. A large image is then resized in strips of rows, so
#: that no copy of it in float32 exists.
_RESIZES_BYTES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
_LARGE, _STRIP = 1 << 24, 256


def crop_one(array: np.ndarray, draws: Draws, recipe: Recipe) -> Tensor:
    """Crop one image (H, W, 3) uint8 to (3, size, size) uint8 with torchvision.

    Called in a loading worker.
    """
    image = torch.from_numpy(array).permute(2, 0, 1)
    box = [int(value[0]) for value in (draws.top, draws.left, draws.box_height, draws.box_width)]
    if draws.crop_first:
        return _resize(V.crop(image, *box), [recipe.size, recipe.size], recipe.interpolation)
    size = [int(draws.height[0]), int(draws.width[0])]
    if math.prod(size) > MOST_PIXELS:
        image, size, box[:2] = _part(image, draws)
    return V.crop(_resize(image, size, recipe.interpolation), *box)  # pads with black if the image is smaller than the crop


def _part(image: Tensor, draws: Draws) -> tuple[Tensor, list[int], list[int]]:
    """Return the part of a narrow image that a crop reads.

    Its resized size and the start of the crop in it follow. Resized as a whole, a line of some thousand pixels takes gigabytes.
    """
    size, start = [], []
    rows, columns = (draws.top, draws.box_height, draws.height), (draws.left, draws.box_width, draws.width)
    for axis, (begin, length, whole) in enumerate((rows, columns)):
        true = image.shape[axis + 1]
        low, high = (int(end[0]) for end in _axis(begin, length, whole, np.array([true]), crop_first=False)[2:])
        image = image.narrow(axis + 1, low, high - low)
        size.append(round((high - low) * float(whole[0]) / true))
        start.append(int(begin[0]) - round(low * float(whole[0]) / true))
    return image, size, start


def _resize(image: Tensor, size: list[int], interpolation: str) -> Tensor:
    mode = V.InterpolationMode(interpolation)
    if _RESIZES_BYTES or interpolation != "bilinear" or image.numel() <= _LARGE:
        return V.resize(image, size, mode, antialias=True)
    strips = [V.resize(strip.float(), [strip.shape[1], size[1]], mode, antialias=True) for strip in image.split(_STRIP, dim=1)]
    return V.resize(torch.cat(strips, dim=1), size, mode, antialias=True).round_().to(torch.uint8)


def plan_of(draws: Draws, sizes: np.ndarray) -> Float[np.ndarray, "16 B"]:
    """Pack the draws into one small table, so that one copy moves them to the device."""
    return np.stack(
        [
            *_axis(draws.top, draws.box_height, draws.height, sizes[:, 0], draws.crop_first),
            *_axis(draws.left, draws.box_width, draws.width, sizes[:, 1], draws.crop_first),
            sizes[:, 0],
            sizes[:, 1],
            draws.flip,
            draws.gray,
            draws.brightness,
            draws.contrast,
            draws.saturation,
            draws.hue,
        ]
    ).astype(np.float32)


def _axis(start: np.ndarray, length: np.ndarray, whole: np.ndarray, true: np.ndarray, crop_first: bool) -> tuple[np.ndarray, ...]:
    """Return start and length of the box in image pixels, and the range that the filter reads."""
    if crop_first:
        return start, length, start, start + length
    factor = true / whole
    begin, length, reach = start * factor, length * factor, _reach(factor)
    return begin, length, np.maximum(np.floor(begin - reach), 0), np.minimum(np.ceil(begin + length + reach), true)


def _reach(factor: np.ndarray) -> np.ndarray:
    """Return how far the widest filter, the cubic, reaches beyond a box, in image pixels."""
    return 2 * np.maximum(factor, 1)


def canvas_of(recipe: Recipe, sizes: Int[np.ndarray, "N 2"], *, random: bool) -> tuple[int, int]:
    """Return a (height, width) that holds the pixels read by any crop of the images.

    The aspect ratio limits a random box, and the size of the crop limits all others. So one panorama
    does not widen the crops of all images. The result does not depend on the draws: a canvas per batch would
    be compiled in many shapes, and the rounding of a crop would depend on the other images of its batch.

    Args:
        recipe: Transform.
        sizes: Height and width of all images.
        random: Whether crops are random, or center crops.

    Returns:
        Multiples of 16, because matrix products of other sizes take up to twice the time on a GPU.
    """
    if random and recipe.scale is not None:
        narrow, wide = sorted(recipe.ratio)
        most = (sizes[:, ::-1] + 1) * (1 / narrow, wide) + 1  # height and width of a box are rounded
    else:
        draws = center_draws(recipe, sizes)
        factor = sizes / np.stack([draws.height, draws.width], 1)
        most = recipe.size * factor + 2 * _reach(factor) + 2  # both ends are rounded
    height, width = np.ceil(np.minimum(most, sizes).max(0) / 16).astype(int) * 16
    return int(height), int(width)


def squares(
    pixels: Int[Tensor, "P"],
    offsets: Int[Tensor, "B"],
    plan: Float[Tensor, "16 B"],
    mean: Tensor,
    std: Tensor,
    recipe: Recipe,
    canvas: tuple[int, int],
) -> Float[Tensor, "B 3 S S"]:
    """Resample a batch of crops from images in memory, antialiased.

    Two batched matrix products, with one filter matrix per axis, equal the antialiased resizing of
    Pillow and torchvision up to their rounding to integers. A GPU uses half precision, whose error
    is a quarter of that rounding.

    Args:
        pixels: Pixels of all images, concatenated, four bytes each: red, green, blue, unused.
        offsets: Start of each image of the batch.
        plan: Table of draws from `plan_of`.
        mean, std: Normalization constants of the backbone's pretraining images.
        recipe: Transform.
        canvas: (height, width) that holds the pixels read by each crop, from `canvas_of`.
    """
    device, count = pixels.device, len(offsets)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    top, tall, top_low, top_high, left, wide, left_low, left_high, height, width, flip = plan[:11]
    # Gather only the pixels that each box needs. Beyond the edge of an image, repeat the edge.
    rows = torch.arange(canvas[0], device=device)[None] + top_low.long()[:, None]
    columns = torch.arange(canvas[1], device=device)[None] + left_low.long()[:, None]
    across, down = width.long()[:, None], height.long()[:, None]
    index = (offsets[:, None] + rows.minimum(down - 1) * across)[:, :, None] + columns.minimum(across - 1)[:, None, :]
    shifts = torch.arange(0, 24, 8, dtype=torch.int32, device=device).view(1, 3, 1, 1)  # a list would be copied, which waits for the device
    gathered = ((pixels[index][:, None] >> shifts) & 255).to(dtype)  # (B, 3, H, W)
    vertical = _filters(top, tall, top_low, top_high, rows, recipe, torch.zeros_like(flip)).to(dtype)  # (B, S, H)
    horizontal = _filters(left, wide, left_low, left_high, columns, recipe, flip).to(dtype)  # (B, S, W)
    narrow = gathered.reshape(count, 3 * canvas[0], canvas[1]) @ horizontal.transpose(1, 2)
    images = vertical[:, None] @ narrow.view(count, 3, canvas[0], recipe.size)
    return color(images.clamp(0, 255), plan, mean, std, recipe)


def _filters(start: Tensor, length: Tensor, low: Tensor, high: Tensor, at: Tensor, recipe: Recipe, flip: Tensor) -> Float[Tensor, "B S L"]:
    """Return the weight of every input position in every output position.

    The filter is a triangle or a cubic, as wide as the reduction requires.
    """
    size = recipe.size
    scale = length / size
    steps = torch.arange(size, device=at.device)
    steps = torch.where(flip[:, None] > 0, size - 1 - steps, steps)
    center = start[:, None] + (steps + 0.5) * scale[:, None]
    x = ((at[:, None, :] + 0.5 - center[:, :, None]) / scale.clamp_min(1)[:, None, None]).abs()
    if recipe.interpolation == "bicubic":  # Keys' cubic with a = -1/2, as in Pillow
        outer = torch.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0)
        weight = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, outer)
    else:
        weight = (1 - x).clamp_min(0)
    weight = weight * ((at >= low[:, None]) & (at < high[:, None]))[:, None, :]
    # A box that exceeds a small image is black there, as padded by torchvision's crop. Without this
    # mask, a filter just outside the edge would still read pixels inside.
    weight = weight * ((center > low[:, None]) & (center < high[:, None]))[:, :, None]
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total.abs() < 1e-6, 1, total)


def color(
    images: Float[Tensor, "B 3 S S"], plan: Float[Tensor, "16 B"], mean: Tensor, std: Tensor, recipe: Recipe
) -> Float[Tensor, "B 3 S S"]:
    """Make drawn images gray, jitter colors and normalize, in float32.

    Input values are from 0 to 255. Grayscale comes before the jitter, as in the code of Roth et al. 2020.
    """
    images = images.float() / 255
    gray, brightness, contrast, saturation, hue = plan[11:, :, None, None, None]
    if recipe.grayscale:
        images = torch.where(gray > 0, _gray(images), images)
    if recipe.jitter:
        images = (images * brightness).clamp(0, 1)
        images = _blend(images, _gray(images).mean((2, 3), keepdim=True), contrast)
        images = _blend(images, _gray(images), saturation)
        images = _turn_hue(images, hue)
    images = (images - mean) / std
    return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images  # the fastest layout for convolutions


def _gray(images: Tensor) -> Tensor:
    return images[:, :1] * 0.2989 + images[:, 1:2] * 0.587 + images[:, 2:] * 0.114


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (factor * images + (1 - factor) * other).clamp(0, 1)


def _turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate the hue of each image by its angle, through HSV, without branching on the data."""
    red, green, blue = images.unbind(1)
    high, low = images.amax(1), images.amin(1)
    chroma = high - low
    safe = torch.where(chroma > 0, chroma, 1)
    green_or_blue = torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    hue = torch.where(high == red, (green - blue) / safe, green_or_blue)
    hue = torch.where(chroma > 0, hue / 6, 0) + turns[:, 0]
    # value - chroma * max(0, min(k, 4 - k, 1)), k = (n + 6 hue) mod 6, n = 5, 3, 1 for red, green, blue
    k = (hue[:, None] * 6 + torch.arange(5.0, 0.0, -2.0, device=images.device).view(1, 3, 1, 1)).remainder(6)
    return high[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


def center_crop(images: Int[Tensor, "B H W 3"], mean: Tensor, std: Tensor, recipe: Recipe) -> Float[Tensor, "B 3 S S"]:
    """Resize, crop and normalize test images of one size, as `center_draws` and `squares` do.

    Height and width are read from the shape by tensor operations, so that an exported graph accepts any
    size. Two matrix products resample the pixels: antialiased resizing is not the same in all runtimes.

    Args:
        images: Pixels, from 0 to 255.
        mean, std: Normalization constants of the backbone's pretraining images, (1, 3, 1, 1) each.
        recipe: Transform.
    """
    height, width = images.shape[1:3]
    sides = [torch.scalar_tensor(side, dtype=torch.int64, device=images.device) for side in (height, width)]
    short = torch.minimum(*sides)
    vertical, horizontal = (_center_filters(side, short, length, recipe) for side, length in zip(sides, (height, width), strict=True))
    pixels = images.permute(0, 3, 1, 2).to(mean.dtype)
    resized = vertical @ (pixels @ horizontal.T)
    return (resized.clamp(0, 255) / 255 - mean) / std


def _center_filters(side: Tensor, short: Tensor, length: int, recipe: Recipe) -> Float[Tensor, "S L"]:
    """Return the filters of the center crop along one axis of `length` positions.

    `side` is the same number as a tensor, and `short` the shorter side.
    """
    whole = side * recipe.resize // short
    excess = whole - recipe.size
    half = excess // 2
    # Rounds half to even, and pads a short image by less before than after.
    start = torch.where(excess < 0, -(-excess // 2), half + (excess % 2) * (half % 2))
    begin, span = ((value * side).float()[None] / whole.float() for value in (start, torch.full_like(side, recipe.size)))
    none = torch.zeros_like(begin)
    at = torch.arange(length, device=side.device)[None].float()
    return _filters(begin, span, none, side.float()[None], at, recipe, none)[0]
