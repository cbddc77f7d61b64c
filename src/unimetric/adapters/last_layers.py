"""Frozen backbone, except for its last layers."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from unimetric.adapters._wrapped import Wrapped
from unimetric.errors import UnimetricError
from unimetric.foreign import completed


class PartlyFrozen(Wrapped):
    """Backbone whose first layers are frozen, and all statistics of BatchNorm.

    The frozen layers store nothing for a backward pass, because none of their parameters is trained.

    Args:
        backbone: Backbone whose trained parameters require gradients, and no others.

    Shape:
        (B, 3, H, W) -> (B, 1 + N, C)
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        self.train()

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def find_stages(self) -> Any:
        return self.backbone.find_stages()


def last_layers(backbone: Any, *, after: Literal["quarter", "half", "three_quarters"] = "half") -> nn.Module:
    """Train only the layers after a depth of the backbone, and freeze those before it.

    The first layers of a network for images are general, and in a convolutional network they take most of the time of a
    backward pass.

    Reference:
        How transferable are features in deep neural networks? (Yosinski et al., NeurIPS 2014).

    Args:
        backbone: Backbone whose blocks are one sequence, such as a ResNet, EfficientNet, ConvNeXt or vision transformer.
        after: Depth at which training starts.

    Returns:
        The backbone, partly frozen.
    """
    stages = completed("backbones", backbone).find_stages()
    if not stages:
        raise UnimetricError("last_layers: the backbone has no sequence of blocks", "use `linear_probe`, or no adapter")
    last = stages[("quarter", "half", "three_quarters").index(after)]
    names = [name for name, _ in backbone.named_parameters()]
    own = {id(parameter) for parameter in last.parameters()}
    frozen = 1 + max(number for number, parameter in enumerate(backbone.parameters()) if id(parameter) in own)
    if frozen == len(names):
        raise UnimetricError(f"last_layers: the backbone has no layers after `{names[-1]}`", "use `linear_probe`")
    for number, parameter in enumerate(backbone.parameters()):
        if number < frozen:
            parameter.requires_grad_(False)
    return PartlyFrozen(backbone)
