"""Histogram loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, compare, full


class Histogram(nn.Module):
    """Learning deep embeddings with histogram loss (Ustinova & Lempitsky, NeurIPS 2016); eqs. 7 to 9 of Roth et al. 2020.

        sum over nodes r of  h-(r) sum_{q <= r} h+(q)

    the chance that a negative pair is more alike than a positive one. h+ and h- are the histograms of the cosine similarities of all
    positive and all negative pairs on evenly spaced nodes of [-1, 1]; a similarity is shared between its two neighbours, linearly.

    Differs from the authors' code: the neighbours are found by rounding down, not by testing floats for equality.

    Args:
        nodes: how many; 65 for CUB200 and CARS196, 11 for SOP in Roth et al.
    """

    family = "pair"

    def __init__(self, *, nodes: int = 65) -> None:
        super().__init__()
        if nodes < 2:
            raise UnimetricError(f"histogram: `nodes` is {nodes}", "write 2 at least: a similarity lies between two of them")
        self.nodes = nodes

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(full(embeddings), labels, memory)
        position = (similarity + 1) * ((self.nodes - 1) / 2)
        node = position.detach().floor().clamp(0, self.nodes - 2)
        counted = pairs.positive | pairs.negative
        upper = torch.where(counted, position - node, 0)
        lower = torch.where(counted, node + 1 - position, 0)
        # One row of counts for each anchor, positives before negatives: the rows do not wait for one another on a GPU.
        place = node.long() + torch.where(pairs.negative, self.nodes, 0)
        counts = similarity.new_zeros(len(labels), 2 * self.nodes).scatter_add(1, place, lower).scatter_add(1, place + 1, upper)
        positive, negative = counts.sum(0).split(self.nodes)
        rank = positive.cumsum(0) / pairs.positive.sum().clamp_min(1)
        return (negative * rank).sum() / pairs.negative.sum().clamp_min(1)
