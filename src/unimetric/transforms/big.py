"""Larger crops."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.images.recipe import Recipe


def big(*, size: Count = 256, resize: Count = 256) -> Recipe:
    """`base` with crops of 256 pixels.

    Reference:
        `big` of Roth et al. 2020, app. B.

    Args:
        size: Side of the crop in pixels.
        resize: Short side of a test image in pixels, before its center crop.
    """
    return Recipe(size=size, resize=resize)
