"""Larger crops."""

from __future__ import annotations

from unimetric.images.recipe import Recipe


def big(*, size: int = 256, resize: int = 256) -> Recipe:
    """`big` of Roth et al. 2020, app. B: `base` with crops of 256 pixels.

    Args:
        size: side of the square.
        resize: short side of a test picture before its centre is cut out.
    """
    return Recipe(size=size, resize=resize)
