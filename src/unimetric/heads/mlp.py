"""A small multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.arguments import Count
from unimetric.kinds import Head


class Mlp(Head):
    """Multilayer perceptron with GELU and without normalization, on the global token.

    The defaults are the MLP-3 baseline of PUMA.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), table 2 c.

    Args:
        dim: Embedding dimension D.
        hidden: Width of the hidden layers.
        layers: Number of linear layers, at least 1.
        features: Number of backbone channels C. Provided by the run.

    Shape:
        tokens (B, 1 + N, C) -> (B, D)
    """

    def __init__(self, *, dim: Count = 128, hidden: Count = 2048, layers: Count = 3, features: Count) -> None:
        super().__init__(dim)
        widths = [features, *[hidden] * (layers - 1), dim]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), nn.GELU()]
        self.layers = nn.Sequential(*parts[:-1])

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.layers(tokens[:, 0])
