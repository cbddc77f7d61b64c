"""A small convolutional network for small pictures on a CPU."""

from __future__ import annotations

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.backbones._convnets import tokens_of
from unimetric.errors import UnimetricError


class Small(nn.Module):
    """Four convolutions with pooling and BatchNorm, as few-shot learning uses them (Vinyals et al. 2016).

    (B, 3, H, W) -> (B, 1 + HW/256, C). Narrow where the picture is large: four million multiplications for 32 pixels, so that two slow
    cores train it in minutes.

    Args:
        channels: width of the last layer; each one before has half of the next.
    """

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, *, channels: int = 128) -> None:
        super().__init__()
        if channels < 8:
            raise UnimetricError(f"small: `channels` is {channels}", "write 8 at least: the first layer has an eighth of them")
        self.channels = channels
        layers: list[nn.Module] = []
        for before, after in pairwise([3, channels // 8, channels // 4, channels // 2, channels]):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.layers(images))
