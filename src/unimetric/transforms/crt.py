"""Crops of the coded residual transform."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Count, Range
from unimetric.images.recipe import Recipe


def crt(*, size: Count = 227, resize: Count = 256, smallest: Annotated[float, Range(above=0, most=1)] = 0.16) -> Recipe:
    """Crops of 227 pixels, as in the coded residual transform.

    The paper does not state the smallest crop. The default is that of the multi-similarity
    framework, on which the authors build.

    Reference:
        Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022).

    Args:
        size: Side of the crop in pixels.
        resize: Short side of a test image in pixels, before its center crop.
        smallest: Smallest fraction of the image area that a training crop covers.
    """
    return Recipe(size=size, resize=resize, scale=(smallest, 1.0))
