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
        orthogonal: W starts with orthogonal rows and b at zero, as in Hyp (Ermolov et al., CVPR 2022); else both as torch's linear layers.
        features: channels of the backbone; a run gives it.
    """

    def __init__(self, *, dim: int = 128, bias: bool = True, orthogonal: bool = False, features: int) -> None:
        super().__init__()
        self.dim = dim
        self.layer = nn.Linear(features, dim, bias=bias)
        if orthogonal:
            nn.init.orthogonal_(self.layer.weight)
            if bias:
                nn.init.zeros_(self.layer.bias)

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.layer(tokens[:, 0])
