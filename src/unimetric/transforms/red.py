"""Reduced augmentation: plain random crops."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.images.recipe import Recipe


def red(*, size: Count = 224, resize: Count = 256) -> Recipe:
    """Resize, random crop of fixed size, horizontal flips.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 4.2, "Red.".

    Args:
        size: Side of the crop in pixels.
        resize: Short side of the image in pixels, before it is cropped.
    """
    return Recipe(size=size, resize=resize, scale=None)
