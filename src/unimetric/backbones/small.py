"""Small convolutional network for small images on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.arguments import Range
from unimetric.backbones._convnets import tokens_of
from unimetric.foreign import stages_of
from unimetric.kinds import Backbone


class Small(Backbone):
    """Four convolutions with pooling and BatchNorm, as in few-shot learning.

    Layers are narrow while the map is large: four million multiplications at 32 pixels, so that two
    slow cores train it in minutes.

    Reference:
        Matching networks for one shot learning (Vinyals et al., NeurIPS 2016).

    Args:
        channels: Width of the last layer. Each earlier layer has half the width of the next.

    Shape:
        images (B, 3, H, W) -> tokens (B, 1 + HW/256, C)
    """

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, *, channels: Annotated[int, Range(8)] = 128) -> None:
        super().__init__()
        self.channels = channels
        layers: list[nn.Module] = []
        for before, after in pairwise([3, channels // 8, channels // 4, channels // 2, channels]):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def find_stages(self) -> Sequence[nn.Module]:
        return stages_of(self)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.layers(images))
