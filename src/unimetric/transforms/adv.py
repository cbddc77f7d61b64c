"""Advanced augmentation with crops and colors."""

from __future__ import annotations

from unimetric.arguments import Count, Fraction, NonNegative
from unimetric.images.recipe import Recipe


def adv(*, size: Count = 224, resize: Count = 256, grayscale: Fraction = 0.2, jitter: NonNegative = 0.2) -> Recipe:
    """Random crops with random grayscale and color jitter.

    A random subset of the images is converted to grayscale. Then brightness, contrast, saturation
    and hue of every image are jittered, in that order. All else is as in `base`.

    Differs from the paper:
        The authors use torchvision's ColorJitter, which applies the four changes in random order.
        Grayscale comes before the jitter, as in their code.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 4.2, "Adv.".

    Args:
        size: Side of the crop in pixels.
        resize: Short side of a test image in pixels, before its center crop.
        grayscale: Probability of the conversion to grayscale.
        jitter: Largest relative change of brightness, contrast and saturation, and largest change of
            hue in turns.
    """
    return Recipe(size=size, resize=resize, grayscale=grayscale, jitter=jitter)
