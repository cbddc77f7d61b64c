"""Larger crops."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.images.recipe import Recipe


def big(*, size: Count = 256, resize: Count = 256) -> Recipe:
    """`base` with crops of 256 pixels.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 4.2, "Big".

    Args:
        size: Side of the crop in pixels.
        resize: Short side of a test image in pixels, before its center crop.
    """
    return Recipe(size=size, resize=resize)
