"""Batch-hard triplets."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.geometry import Pairs, Triplets


class Hardest(nn.Module):
    """Batch hard: in defense of the triplet loss for person re-identification, eq. 5 (Hermans et al., 2017). PUMA's for the triplet loss.

        p = argmax_p d_ap,   n = argmin_n d_an

    One triplet an anchor, nothing drawn.
    """

    gives = Triplets

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        positive = torch.where(pairs.positive, similarity, math.inf).argmin(-1)
        negative = torch.where(pairs.negative, similarity, -math.inf).argmax(-1)
        anchor = torch.arange(len(similarity), device=similarity.device)
        return Triplets(anchor, positive, negative, pairs.positive.any(-1) & pairs.negative.any(-1))
