"""Frozen backbone; only the head is trained."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.adapters._wrapped import Wrapped
from unimetric.foreign import completed


class FrozenBackbone(Wrapped):
    """Backbone with frozen weights and statistics that stores nothing for a backward pass.

    Args:
        backbone: Any backbone.

    Shape:
        (B, 3, H, W) -> (B, 1 + N, C)
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__(completed("backbones", backbone).requires_grad_(False).eval())

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.backbone.eval()
        return self

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return super().forward(images)


def linear_probe(backbone: Any) -> nn.Module:
    """Freeze the backbone, so that only the head is trained.

    With `head = "linear"` this is the "linear embedding" baseline of PUMA, with `head = "mlp"` its MLP-3 baseline.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), table 2.

    Args:
        backbone: Any backbone, not only a transformer.

    Returns:
        The frozen backbone.
    """
    return FrozenBackbone(backbone)
