"""Crops of universal metric learning."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Count, Range
from unimetric.images.recipe import Recipe


def puma(*, size: Count = 224, resize: Count = 256, smallest: Annotated[float, Range(above=0, most=1)] = 0.2) -> Recipe:
    """Bicubic crops of at least a fifth of the image, as in universal metric learning.

    Differs from the paper:
        The text says "resized to 256 x 256". The short side is resized, as in the code.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al. 2023).

    Args:
        size: Side of the crop in pixels.
        resize: Short side of a test image in pixels, before its center crop.
        smallest: Smallest fraction of the image area that a training crop covers.
    """
    return Recipe(size=size, resize=resize, scale=(smallest, 1.0), interpolation="bicubic")
