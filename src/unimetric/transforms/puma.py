"""The crops of universal metric learning."""

from __future__ import annotations

from unimetric.images.recipe import Recipe


def puma(*, size: int = 224, resize: int = 256, smallest: float = 0.2) -> Recipe:
    """Universal metric learning with parameter-efficient transfer learning (Kim et al. 2023): bicubic, crops of at least a fifth.

    Differs from the paper's text ("resized to 256 x 256"): the short side is resized, as in the code.

    Args:
        size: side of the square.
        resize: short side of a test picture before its centre is cut out.
        smallest: least share of the picture's area that a training crop takes.
    """
    return Recipe(size=size, resize=resize, scale=(smallest, 1.0), interpolation="bicubic")
