"""Crops for small images of letters."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Count, Range
from unimetric.images.recipe import Recipe


def glyphs(*, size: Count = 32, smallest: Annotated[float, Range(above=0, most=1)] = 0.5) -> Recipe:
    """Mild crops without flips, for the embedded dataset `glyphs`.

    As in Roth et al. 2020, but crops cover at least half of the image. There are no flips, because
    a mirrored letter is another letter.

    Args:
        size: Side of the crop in pixels.
        smallest: Smallest fraction of the image area that a training crop covers.
    """
    return Recipe(size=size, resize=size, scale=(smallest, 1.0), flip=0.0)
