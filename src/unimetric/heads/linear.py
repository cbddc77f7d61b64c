"""One linear layer."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.arguments import Count
from unimetric.errors import UnimetricError
from unimetric.heads._common import init_kaiming, pool_tokens
from unimetric.kinds import Head


class Linear(Head):
    """Linear embedding layer.

        g = W x + b

    x is the backbone's global token, or the mean or maximum over its spatial positions.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020).

    Args:
        dim: Embedding dimension D.
        pool: Input of the layer: `summary` for the global token, `mean` or `max` over the spatial
            positions. The global token of a convolutional network is the mean; a transformer has a
            class token instead.
        bias: Whether the layer has a bias.
        orthogonal: Whether W starts with orthogonal rows and b at zero, as in Hyp (Ermolov et al.,
            CVPR 2022). Requires `init="torch"`.
        init: Initial distribution: `torch` for the default of `nn.Linear`, `kaiming` for
            `kaiming_normal_(mode="fan_out")` and a zero bias. The latter is used by the framework
            of the CRT authors (`kanshichao/CBML`).
        features: Number of backbone channels C. Provided by the run.

    Shape:
        tokens (B, 1 + N, C) -> (B, D)
    """

    def __init__(
        self,
        *,
        dim: Count = 128,
        pool: Literal["summary", "mean", "max"] = "summary",
        bias: bool = True,
        orthogonal: bool = False,
        init: Literal["torch", "kaiming"] = "torch",
        features: Count,
    ) -> None:
        super().__init__(dim)
        if orthogonal and init != "torch":
            raise UnimetricError(f"linear: `orthogonal=True` requires `init='torch'`, got {init!r}", "drop `orthogonal` or `init`")
        self.pool = pool
        self.layer = nn.Linear(features, dim, bias=bias)
        if init == "kaiming":
            init_kaiming(self.layer)
        if orthogonal:
            nn.init.orthogonal_(self.layer.weight)
            if bias:
                nn.init.zeros_(self.layer.bias)

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.layer(pool_tokens(tokens, self.pool))
