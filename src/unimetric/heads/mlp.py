"""A small network."""

from __future__ import annotations

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn


class Mlp(nn.Module):
    """MLP-3 of PUMA (Kim et al. 2023), table 3: (B, 1 + N, C) -> (B, D) through hidden layers with GELU, without normalisation.

    Args:
        dim: embedding dimension.
        hidden: width of the hidden layers.
        layers: linear layers in all.
        features: channels of the backbone; a run gives it.
    """

    def __init__(self, *, dim: int = 128, hidden: int = 2048, layers: int = 3, features: int) -> None:
        super().__init__()
        self.dim = dim
        widths = [features, *[hidden] * (layers - 1), dim]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), nn.GELU()]
        self.layers = nn.Sequential(*parts[:-1])

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.layers(tokens[:, 0])
