"""Four linear heads side by side."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import unit


class Diva(nn.Module):
    """The embedding of DiVA (Milbich et al., ECCV 2020): (B, 1 + N, C) -> (B, 4 D), for the objective `diva`.

        f = unit([w_1 unit(W_1 summary), ..., w_4 unit(W_4 summary)])

    in the order discriminative, shared, self-similarity, intra. The weights matter at test time only, since each head has a loss of its
    own. The authors report the best of equal weights, (0.75, 1.25, 1.25, 1.25), theirs for CUB200, and (0.5, 1.5, 1.5, 1.5), for
    CARS196; they are equal on Stanford Online Products.

    Args:
        dim: dimension of each head; the embedding has four times as many.
        weights: of the four heads in the embedding.
        features: channels of the backbone; a run gives it.
    """

    def __init__(self, *, dim: int = 128, weights: tuple[float, ...] = (0.75, 1.25, 1.25, 1.25), features: int) -> None:
        super().__init__()
        if len(weights) != 4:
            raise UnimetricError(f"the head `diva` has four branches, but `weights` has {len(weights)}", "write `weights=(1, 1, 1, 1)`")
        self.dim, self.dims, self.weights = 4 * dim, (dim,) * 4, tuple(weights)
        self.layer = nn.Linear(features, 4 * dim)  # the four beside one another: one product instead of four

    def branches(self, tokens: Float[Tensor, "B N C"]) -> tuple[Float[Tensor, "B D"], ...]:
        """What the four heads say, raw."""
        return self.layer(tokens[:, 0]).chunk(4, -1)

    def join(self, branches: tuple[Float[Tensor, "B D"], ...]) -> Float[Tensor, "B E"]:
        """The embedding: weighted directions one after another."""
        return unit(torch.cat([weight * unit(branch) for weight, branch in zip(self.weights, branches, strict=True)], -1))

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B E"]:
        return self.join(self.branches(tokens))
