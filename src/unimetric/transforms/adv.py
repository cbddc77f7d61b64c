"""Advanced augmentation: crops and colours."""

from __future__ import annotations

from unimetric.transforms import Recipe


def adv(*, size: int = 224, resize: int = 256, grayscale: float = 0.2, jitter: float = 0.2) -> Recipe:
    """`adv` of Roth et al. 2020, app. B: `base` with random loss of colour and jitter of brightness, contrast, saturation and hue.

    Differs from torchvision's ColorJitter, which the authors use: the four come in one order, not a random one.

    Args:
        size: side of the square.
        resize: short side of a test picture before its centre is cut out.
        grayscale: probability of losing all colour.
        jitter: how far each of the four may go.
    """
    return Recipe(size=size, resize=resize, grayscale=grayscale, jitter=jitter)
