"""Crops for small pictures of letters."""

from __future__ import annotations

from unimetric.images.recipe import Recipe


def glyphs(*, size: int = 32, smallest: float = 0.5) -> Recipe:
    """For the embedded dataset `glyphs`: mild crops (as in Roth et al. 2020, but at least half of the picture), never a mirror image,
    since a mirrored letter is another letter.

    Args:
        size: side of the square.
        smallest: least share of the picture's area that a training crop takes.
    """
    return Recipe(size=size, resize=size, scale=(smallest, 1.0), flip=0.0)
