"""Histogram loss."""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Range
from unimetric.geometry import Memory, compare, upcast_half
from unimetric.kinds import Loss


class Histogram(Loss):
    """Probability that a negative pair is more similar than a positive pair.

        sum over nodes r of  h-(r) sum_{q <= r} h+(q)

    h+ and h- are the histograms of the cosine similarities of all positive and all negative pairs.
    Their nodes are evenly spaced on [-1, 1]. Each similarity is split linearly between its two
    neighboring nodes.

    Differs from the paper:
        The code of Roth et al. finds the nodes by comparing floats for equality; here the position
        is rounded down. With 65 nodes the values are equal. With 11 nodes their comparison drops
        the upper parts of 6 of the 10 intervals, and their value is 3.6 to 6.3 times smaller. Their
        results on SOP, with 11 nodes, come from that smaller loss.

    Reference:
        Learning deep embeddings with histogram loss (Ustinova & Lempitsky, NeurIPS 2016); eqs. 7 to
        9 of Roth et al. 2020.

    Args:
        nodes: Number of histogram nodes, at least 2. Roth et al. use 65 for CUB200 and CARS196, and
            11 for SOP.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"

    def __init__(self, *, nodes: Annotated[int, Range(2)] = 65) -> None:
        super().__init__()
        self.nodes = nodes

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)
        position = (similarity + 1) * ((self.nodes - 1) / 2)
        node = position.detach().floor().nan_to_num(0).clamp(0, self.nodes - 2)  # NaN cannot be an index, but stays in the counts
        counted = pairs.positive | pairs.negative
        upper = torch.where(counted, position - node, 0)
        lower = torch.where(counted, node + 1 - position, 0)
        # One row of counts per anchor, positives before negatives, avoids atomic conflicts between rows on a GPU.
        place = node.long() + torch.where(pairs.negative, self.nodes, 0)
        counts = similarity.new_zeros(len(labels), 2 * self.nodes).scatter_add(1, place, lower).scatter_add(1, place + 1, upper)
        positive, negative = counts.sum(0).split(self.nodes)
        rank = positive.cumsum(0) / pairs.positive.sum().clamp_min(1)
        return (negative * rank).sum() / pairs.negative.sum().clamp_min(1)
