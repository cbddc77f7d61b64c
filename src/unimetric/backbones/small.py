"""A small convolutional network for small pictures on a CPU."""

from __future__ import annotations

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.backbones import tokens_of


class Small(nn.Module):
    """Four convolutions with BatchNorm, as few-shot learning uses them (Vinyals et al. 2016), but with strides in place of pooling.

    (B, 3, H, W) -> (B, 1 + HW/256, C). Three million multiplications for a picture of 32 pixels: two slow cores train it in a minute.

    Args:
        channels: width of the last two layers; the first has a quarter of it.
    """

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, *, channels: int = 128) -> None:
        super().__init__()
        self.channels = channels
        layers: list[nn.Module] = []
        for before, after in pairwise([3, channels // 4, channels // 2, channels, channels]):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.layers(images))
