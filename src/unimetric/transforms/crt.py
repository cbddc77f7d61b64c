"""The crops of the coded residual transform."""

from __future__ import annotations

from unimetric.images.recipe import Recipe


def crt(*, size: int = 227, resize: int = 256, smallest: float = 0.16) -> Recipe:
    """Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022): crops of 227 pixels.

    The smallest crop is not in the paper; it is that of the multi-similarity framework which the authors build on.

    Args:
        size: side of the square.
        resize: short side of a test picture before its centre is cut out.
        smallest: least share of the picture's area that a training crop takes.
    """
    return Recipe(size=size, resize=resize, scale=(smallest, 1.0))
