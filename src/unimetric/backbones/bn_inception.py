"""BN-Inception, long a standard backbone of metric learning, now in no library."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unimetric.backbones._convnets import ConvNet, tokens_of
from unimetric.backbones._layouts import recognize, to_inception
from unimetric.backbones._weights import fill, read_weights

# Figure 5 of the paper: width of the 1x1, the 3x3 after its reduction, the two 3x3 after theirs, and
# the projection after the pooling. A module without 1x1 and projection halves the map and passes the
# pooled input through.
_TABLE = {
    "3a": (64, (64, 64), (64, 96), 32),
    "3b": (64, (64, 96), (64, 96), 64),
    "3c": (0, (128, 160), (64, 96), 0),
    "4a": (224, (64, 96), (96, 128), 128),
    "4b": (192, (96, 128), (96, 128), 128),
    "4c": (160, (128, 160), (128, 160), 128),
    "4d": (96, (128, 192), (160, 192), 128),
    "4e": (0, (128, 192), (192, 256), 0),
    "5a": (352, (192, 320), (160, 224), 128),
    "5b": (352, (192, 320), (192, 224), 128),
}


class BnInception(ConvNet):
    """BN-Inception with its ImageNet architecture.

    A map of odd side is padded with zeros before it is halved, so that images of any size are
    accepted.

    Differs from the paper:
        Like the released Caffe network, whose weights are in common use, 4c and 4d project their
        pooling to 128, not 96. That network reads blue, green, red from 0 to 255, minus (104, 117,
        128). This one takes red, green, blue like all backbones, and reverses them itself.

    Reference:
        Batch normalization: accelerating deep network training by reducing internal covariate shift
        (Ioffe & Szegedy, ICML 2015).

    Args:
        weights: Path of the network as converted from Caffe (`bn_inception-52deb4733.pth`). If
            empty, weights are random.
        frozen_batchnorm: Whether BatchNorm keeps its stored statistics, scale and shift (Roth
            et al. 2020).
        train_affine: Whether scale and shift are trained nevertheless.

    Shape:
        images (B, 3, H, W) -> tokens (B, 1 + N, 1024), N = 49 at 224 pixels
    """

    mean = (128 / 255, 117 / 255, 104 / 255)
    std = (1 / 255, 1 / 255, 1 / 255)
    channels = 1024

    def __init__(self, *, weights: str = "", frozen_batchnorm: bool = False, train_affine: bool = False) -> None:
        super().__init__()
        state = read_weights(weights, backbone="bn_inception") if weights else {}
        layers: dict[str, nn.Module] = {
            "conv1_7x7_s2": _Unit(3, 64, 7, stride=2),
            "pool1": nn.MaxPool2d(3, 2, ceil_mode=True),
            "conv2_3x3_reduce": _Unit(64, 64, 1),
            "conv2_3x3": _Unit(64, 192, 3),
            "pool2": nn.MaxPool2d(3, 2, ceil_mode=True),
        }
        width = 192
        for name, (one, three, double, projection) in _TABLE.items():
            layers[name] = _Module(width, one, three, double, projection, pool="max" if name == "5b" else "average")
            width = one + three[1] + double[1] + (projection or width)
        self.network = nn.Sequential()
        for name, layer in layers.items():
            self.network.add_module(name, layer)
        if weights:
            fill(self.network, to_inception(state), weights, layout=recognize(state).name)
        if frozen_batchnorm:
            self.fix_batchnorm(affine=not train_affine)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.network(images.flip(1)))


class _Unit(nn.Module):
    """Convolution, BatchNorm, ReLU.

    The bias is redundant with BatchNorm, but kept: a frozen BatchNorm does not remove it.
    """

    def __init__(self, before: int, after: int, side: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, side, stride, side // 2)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, map_: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D h w"]:
        return functional.relu(self.norm(self.conv(map_)), inplace=True)


class _Module(nn.ModuleDict):
    """Four parallel branches on a map; one row of the table. Keys are those of Caffe."""

    def __init__(self, before: int, one: int, three: tuple[int, int], double: tuple[int, int], projection: int, *, pool: str) -> None:
        stride = 1 if projection else 2
        units = {"1x1": _Unit(before, one, 1)} if one else {}
        units |= {"3x3_reduce": _Unit(before, three[0], 1), "3x3": _Unit(*three, 3, stride=stride)}
        units |= {"double_3x3_reduce": _Unit(before, double[0], 1), "double_3x3_1": _Unit(*double, 3)}
        units |= {"double_3x3_2": _Unit(double[1], double[1], 3, stride=stride)}
        units |= {"pool_proj": _Unit(before, projection, 1)} if projection else {}
        super().__init__(units)
        self.pool = pool

    def forward(self, map_: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D h w"]:
        branches = [self["1x1"](map_)] if "1x1" in self else []
        branches.append(self["3x3"](self["3x3_reduce"](map_)))
        branches.append(self["double_3x3_2"](self["double_3x3_1"](self["double_3x3_reduce"](map_))))
        if "pool_proj" not in self:
            # Values after ReLU are nonnegative, so zero padding changes no maximum.
            even = functional.pad(map_, (0, map_.shape[3] % 2, 0, map_.shape[2] % 2))
            branches.append(functional.max_pool2d(even, 3, 2, ceil_mode=True))
        elif self.pool == "max":
            branches.append(self["pool_proj"](functional.max_pool2d(map_, 3, 1, 1)))
        else:
            branches.append(self["pool_proj"](functional.avg_pool2d(map_, 3, 1, 1)))
        return torch.cat(branches, 1)
