"""Head of DiVA: four linear layers whose outputs are concatenated."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.arguments import Count, Real
from unimetric.geometry import unit
from unimetric.kinds import Head

#: The weightings whose best result the authors report: equal, CUB200's, and CARS196's.
PUBLISHED = ((1.0, 1.0, 1.0, 1.0), (0.75, 1.25, 1.25, 1.25), (0.5, 1.5, 1.5, 1.5))


class Diva(Head):
    """DiVA's embedding of four heads: (B, 1 + N, C) -> (B, 4 D), for the objective `diva`.

        f = unit([w_1 unit(W_1 summary), ..., w_4 unit(W_4 summary)])

    The order is discriminative, shared, self-similarity, intra. Each head has its own loss, so the
    weights act at test time only. They can be changed later:
    `unimetric evaluate RUN "head=diva(weights=(0.5, 1.5, 1.5, 1.5))"`. The authors report the best of
    three weightings: equal (Stanford Online Products), (0.75, 1.25, 1.25, 1.25) (CUB200) and
    (0.5, 1.5, 1.5, 1.5) (CARS196). A run evaluates all three.

    Reference:
        Diverse visual feature aggregation for deep metric learning (Milbich et al., ECCV 2020).

    Args:
        dim: Dimension of each head. The embedding has four times as many.
        weights: Weights of the four heads in the embedding.
        features: Number of backbone channels, provided by the run.
    """

    test_time: tuple[str, ...] = ("weights",)

    def __init__(self, *, dim: Count = 128, weights: tuple[Real, Real, Real, Real] = (0.75, 1.25, 1.25, 1.25), features: Count) -> None:
        super().__init__(4 * dim, (dim,) * 4)
        self.weights = tuple(weights)
        self.layer = nn.Linear(features, 4 * dim)  # one matrix product instead of four

    def branches(self, tokens: Float[Tensor, "B N C"]) -> tuple[Float[Tensor, "B D"], ...]:
        """Compute the raw outputs of the four heads."""
        return self.layer(tokens[:, 0]).chunk(4, -1)

    def join(self, branches: tuple[Float[Tensor, "B D"], ...]) -> Float[Tensor, "B E"]:
        """Concatenate the weighted directions to the embedding."""
        return _join(branches, self.weights)

    def variants(self, embeddings: Float[Tensor, "B E"]) -> dict[str, Float[Tensor, "B E"]]:
        """Compute the embeddings with each published weighting from the head's own embeddings.

        Returns an empty dictionary if one of the head's own weights is 0, because the embedding then lacks that branch.
        """
        if 0 in self.weights:
            return {}
        signs = [math.copysign(1.0, weight) for weight in self.weights]
        branches = [sign * chunk for sign, chunk in zip(signs, embeddings.chunk(4, -1), strict=True)]
        return {f"weights={','.join(f'{weight:g}' for weight in weights)}": _join(tuple(branches), weights) for weights in PUBLISHED}

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B E"]:
        return self.join(self.branches(tokens))


def _join(branches: tuple[Float[Tensor, "B D"], ...], weights: tuple[float, ...]) -> Float[Tensor, "B E"]:
    return unit(torch.cat([weight * unit(branch) for weight, branch in zip(weights, branches, strict=True)], -1))
