"""A small multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.errors import UnimetricError


class Mlp(nn.Module):
    """Multilayer perceptron with GELU and without normalization, on the backbone's global token.

    The defaults are the MLP-3 baseline of PUMA.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), table 3.

    Args:
        dim: Embedding dimension D.
        hidden: Width of the hidden layers.
        layers: Number of linear layers, at least 1.
        features: Number of backbone channels C. Provided by the run.

    Shape:
        tokens (B, 1 + N, C) -> (B, D)
    """

    def __init__(self, *, dim: int = 128, hidden: int = 2048, layers: int = 3, features: int) -> None:
        super().__init__()
        if layers < 1:
            raise UnimetricError(f"mlp: `layers` must be at least 1, got {layers}", "use `layers=3`")
        self.dim = dim
        widths = [features, *[hidden] * (layers - 1), dim]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), nn.GELU()]
        self.layers = nn.Sequential(*parts[:-1])

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.layers(tokens[:, 0])
