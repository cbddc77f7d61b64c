"""One linear layer."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.errors import UnimetricError


class Linear(nn.Module):
    """The embedding layer of Roth et al. 2020: (B, 1 + N, C) -> (B, D).

        g = W x + b,   x the backbone's summary, or the mean of its positions

    Args:
        dim: embedding dimension.
        pool: what stands for the picture: `summary`, the backbone's own, or `mean`, the mean of its positions. Convolutional networks have
            no other summary; a transformer's is a token of its own, and the mean tells what its positions know without it.
        bias: whether there is a b.
        orthogonal: W starts with orthogonal rows and b at zero, as in Hyp (Ermolov et al., CVPR 2022); else both as torch's linear layers.
        features: channels of the backbone; a run gives it.
    """

    def __init__(self, *, dim: int = 128, pool: str = "summary", bias: bool = True, orthogonal: bool = False, features: int) -> None:
        super().__init__()
        if pool not in ("summary", "mean"):
            raise UnimetricError(f"`pool` of the head `linear` cannot be {pool!r}", "choose from: summary, mean")
        self.dim, self.pool = dim, pool
        self.layer = nn.Linear(features, dim, bias=bias)
        if orthogonal:
            nn.init.orthogonal_(self.layer.weight)
            if bias:
                nn.init.zeros_(self.layer.bias)

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        if self.pool == "summary":
            return self.layer(tokens[:, 0])
        if tokens.shape[1] < 2:
            raise UnimetricError("`pool=mean` needs positions, but this backbone gives its summary alone", 'write `head = "linear"`')
        return self.layer(tokens[:, 1:].mean(1))
