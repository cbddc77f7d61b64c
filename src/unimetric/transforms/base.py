"""Standard crops of deep metric learning."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Count, Fraction, Range
from unimetric.images.recipe import Recipe


def base(
    *, size: Count = 224, resize: Count = 256, smallest: Annotated[float, Range(above=0, most=1)] = 0.08, flip: Fraction = 0.5
) -> Recipe:
    """Random resized crops with horizontal flips for training, center crops for testing.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 4.1, "Base" in section 4.2.

    Args:
        size: Side of the crop in pixels.
        resize: Short side of a test image in pixels, before its center crop.
        smallest: Smallest fraction of the image area that a training crop covers.
        flip: Probability of a horizontal flip.
    """
    return Recipe(size=size, resize=resize, scale=(smallest, 1.0), flip=flip)
