"""How images are cropped and colored, as data: what a transform returns."""

from __future__ import annotations

from dataclasses import dataclass

from unimetric.errors import UnimetricError


@dataclass(frozen=True)
class Recipe:
    """What happens to a picture.

    Args:
        size: side of the square that the backbone sees.
        resize: short side before the centre crop of a test picture, and before a plain random crop.
        scale: share of the picture's area that a training crop takes, from and to; `None` for a crop of `size` after `resize`.
        ratio: width over height of a training crop, from and to.
        flip: probability of a mirror image.
        grayscale: probability of losing all colour.
        jitter: how far brightness, contrast, saturation and hue may each go.
        interpolation: `bilinear` or `bicubic`; both antialiased, as Pillow's.
    """

    size: int
    resize: int
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    grayscale: float = 0.0
    jitter: float = 0.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for key in ("size", "resize"):
            pixels = getattr(self, key)
            if pixels < 1:
                raise UnimetricError(f"`{key}` must be at least 1 pixel, not {pixels}", f"write `{key}=224`, or leave it out")
