"""Reduced augmentation: plain random crops."""

from __future__ import annotations

from unimetric.images.recipe import Recipe


def red(*, size: int = 224, resize: int = 256) -> Recipe:
    """`red` of Roth et al. 2020, app. B: resize, random crop of fixed size, mirror images.

    Args:
        size: side of the square.
        resize: short side of the picture before it is cropped.
    """
    return Recipe(size=size, resize=resize, scale=None)
