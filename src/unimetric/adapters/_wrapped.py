"""Backbone around another one."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from unimetric.kinds import Backbone


class Wrapped(Backbone):
    """Backbone around another one, whose channels, mean and standard deviation it has.

    Args:
        backbone: Any backbone.

    Shape:
        (B, 3, H, W) -> (B, 1 + N, C)
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.channels: int = backbone.channels
        self.mean: tuple[float, ...] = backbone.mean
        self.std: tuple[float, ...] = backbone.std

    def merged(self) -> Any:
        """Return the wrapped backbone."""
        return self.backbone

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return self.backbone(images)
