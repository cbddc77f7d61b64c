"""Shared code of convolutional backbones: feature maps as tokens, and frozen BatchNorm."""

from __future__ import annotations

from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.kinds import Backbone

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def tokens_of(map_: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N C"]:
    """Convert the feature map of a convolutional network to tokens, with their mean first."""
    positions = map_.flatten(2).transpose(1, 2)
    return torch.cat([positions.mean(1, keepdim=True), positions], 1)


def freeze_batchnorm(network: nn.Module, *, affine: bool) -> None:
    """Freeze the scale and shift of BatchNorm if `affine`.

    See `rest_batchnorm` for its statistics.
    """
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(not affine)


def rest_batchnorm(network: nn.Module) -> None:
    """Fix every BatchNorm at its stored statistics.

    Call this after each switch to training mode.
    """
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


class ConvNet(Backbone):
    """Backbone whose BatchNorm may be frozen.

    Attributes:
        network: Network whose BatchNorm it is.
    """

    network: Any
    frozen_batchnorm = False

    def fix_batchnorm(self, *, affine: bool) -> None:
        """Fix the statistics of every BatchNorm, and its scale and shift if `affine`."""
        self.frozen_batchnorm = True
        freeze_batchnorm(self.network, affine=affine)
        rest_batchnorm(self.network)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen_batchnorm:
            rest_batchnorm(self.network)
        return self
