"""No head: the backbone's own features."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


class Identity(nn.Module):
    """The summary as it is, (B, 1 + N, C) -> (B, C): the "ImageNet features" row of Roth et al. 2020, and any network without training.

    Args:
        features: channels of the backbone; a run gives it.
    """

    def __init__(self, *, features: int) -> None:
        super().__init__()
        self.dim = features

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return tokens[:, 0]
