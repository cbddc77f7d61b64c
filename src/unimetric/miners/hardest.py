"""Batch-hard triplets."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.geometry import Pairs, Triplets
from unimetric.kinds import Miner


class Hardest(Miner):
    """Selection of the farthest positive and the nearest negative of each anchor.

        p = argmax_p d_ap,   n = argmin_n d_an

    Each anchor has one triplet, and nothing is random. PUMA uses this miner for the triplet loss.

    Reference:
        In defense of the triplet loss for person re-identification (Hermans et al., 2017), eq. 5.

    Shape:
        similarity (B, R) -> Triplets, B of them
    """

    gives = Triplets

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        positive = torch.where(pairs.positive, similarity, math.inf).argmin(-1)
        negative = torch.where(pairs.negative, similarity, -math.inf).argmax(-1)
        anchor = torch.arange(len(similarity), device=similarity.device)
        return Triplets(anchor, positive, negative, pairs.positive.any(-1) & pairs.negative.any(-1))
