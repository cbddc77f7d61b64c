"""How images are cropped and colored, as data: what a transform returns."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from unimetric.arguments import Count, Fraction, NonNegative, Positive, check


@dataclass(frozen=True)
class Recipe:
    """Image transform, as data.

    Args:
        size: Side of the crop that the backbone receives, in pixels.
        resize: Short side before the center crop of a test image, and before a plain random crop.
        scale: Range of the area fraction of a training crop. `None` crops `size` pixels after
            `resize`.
        ratio: Range of the aspect ratio (width over height) of a training crop.
        flip: Probability of a horizontal flip.
        grayscale: Probability of conversion to grayscale.
        jitter: Maximum change of brightness, contrast, saturation and hue.
        interpolation: `bilinear` or `bicubic`; both antialiased, as in Pillow.
    """

    size: Count
    resize: Count
    scale: tuple[Fraction, Fraction] | None = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    flip: Fraction = 0.5
    grayscale: Fraction = 0.0
    jitter: NonNegative = 0.0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        check(Recipe, vars(self))
        if self.resize < self.size:
            message = "test images are resized to a short side of %s pixels, and padded with black to %s; use `resize=%s`"
            logging.getLogger("unimetric").warning(message, self.resize, self.size, self.size * 8 // 7)
