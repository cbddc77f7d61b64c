"""One linear layer."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


class Linear(nn.Module):
    """The embedding layer of Roth et al. 2020: (B, 1 + N, C) -> (B, D).

        g = W summary + b

    Args:
        dim: embedding dimension.
        bias: whether there is a b.
        features: channels of the backbone; a run gives it.
    """

    def __init__(self, *, dim: int = 128, bias: bool = True, features: int) -> None:
        super().__init__()
        self.dim = dim
        self.layer = nn.Linear(features, dim, bias=bias)

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.layer(tokens[:, 0])
