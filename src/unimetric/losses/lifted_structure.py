"""Lifted structure loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Real
from unimetric.geometry import Memory, distances, log_sum_exp, masked_mean, match, upcast_half
from unimetric.kinds import Loss


class LiftedStructure(Loss):
    """Squared hinge on each positive pair against all negatives of both its samples.

        1/2 mean over positive pairs (a, p) of
            [log(sum_n exp(margin - d_an) + sum_n exp(margin - d_pn)) + d_ap]_+^2

    d is the Euclidean distance of raw embeddings, and n are the negatives of a and of p. Pairs
    without negatives are skipped. With a memory, the negatives of p are those of the memory. They
    are found by an (R, R) distance matrix without gradient.

    Reference:
        Deep metric learning via lifted structured feature embedding (Oh Song et al., CVPR 2016),
        eq. 4.

    Args:
        margin: Distance that negatives should exceed; alpha in the paper.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"

    def __init__(self, *, margin: Real = 1.0) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = upcast_half(embeddings)
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        distance = distances(embeddings, embeddings if memory is None else upcast_half(memory.embeddings))  # (B, R)
        push = others = log_sum_exp(self.margin - distance, pairs.negative)  # (B,)
        if memory is not None:
            ring = upcast_half(memory.embeddings).detach()
            negative = (memory.labels[:, None] != memory.labels[None, :]) & memory.valid
            others = log_sum_exp(self.margin - distances(ring, ring), negative)  # (R,)
        hinge = (torch.logaddexp(push[:, None], others[None, :]) + distance).relu()
        return masked_mean(hinge.square(), pairs.positive & pairs.negative.any(-1, keepdim=True)) / 2
