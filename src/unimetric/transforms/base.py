"""The standard crops of deep metric learning."""

from __future__ import annotations

from unimetric.images.recipe import Recipe


def base(*, size: int = 224, resize: int = 256, smallest: float = 0.08, flip: float = 0.5) -> Recipe:
    """`base` of Roth et al. 2020: train on random resized crops and mirror images, test on the centre.

    Args:
        size: side of the square.
        resize: short side of a test picture before its centre is cut out.
        smallest: least share of the picture's area that a training crop takes.
        flip: probability of a mirror image.
    """
    return Recipe(size=size, resize=resize, scale=(smallest, 1.0), flip=flip)
