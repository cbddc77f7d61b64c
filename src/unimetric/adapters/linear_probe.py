"""Nothing but the head is trained."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Resting(nn.Module):
    """A backbone that neither learns nor changes its statistics, and keeps nothing for a backward pass.

    Args:
        backbone: any.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False).eval()
        self.channels: int = backbone.channels
        self.mean: tuple[float, ...] = backbone.mean
        self.std: tuple[float, ...] = backbone.std

    def train(self, mode: bool = True) -> Resting:
        super().train(mode)
        self.backbone.eval()
        return self

    def merged(self) -> Any:
        """The backbone itself."""
        return self.backbone

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return self.backbone(images)


def linear_probe(backbone: Any) -> nn.Module:
    """The "linear embedding" of PUMA's comparison (Kim et al. 2023), and with `head = "mlp"` its MLP-3: a frozen network, a trained head.

    Args:
        backbone: any, transformer or not.
    """
    return Resting(backbone)
