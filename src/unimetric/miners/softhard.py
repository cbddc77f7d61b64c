"""Soft-hard triplets."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.geometry import Dice, Pairs, Triplets, draw, masked_max, masked_min


class Softhard(nn.Module):
    """Soft-hard mining (Roth & Brattoli, 2019); eqs. 21 and 22 of Roth et al. 2020.

        p evenly among  {p : d_ap > min_n d_an},  or among all positives where there is none
        n evenly among  {n : d_an < max_p d_ap},  or among all negatives where there is none

    One triplet an anchor. Differs from the printed equations: the extremes are distances, not the samples that reach them, and eq. 22
    is of the positive.
    """

    gives = Triplets

    def __init__(self) -> None:
        super().__init__()
        self.dice = Dice()

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        rows = len(similarity)
        first, second = self.dice(2 * rows).view(2, rows)
        far = pairs.positive & (similarity < masked_max(similarity, pairs.negative)[:, None])
        near = pairs.negative & (similarity > masked_min(similarity, pairs.positive)[:, None])
        positive, has_positive = draw(torch.where(far.any(-1, keepdim=True), far, pairs.positive), first)
        negative, has_negative = draw(torch.where(near.any(-1, keepdim=True), near, pairs.negative), second)
        return Triplets(torch.arange(rows, device=similarity.device), positive, negative, has_positive & has_negative)
