"""Soft-hard triplets."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.geometry import CounterRNG, Pairs, Triplets, draw, masked_max, masked_min
from unimetric.kinds import Miner


class Softhard(Miner):
    """Sampling among positives and negatives that are harder than the other type's extreme.

        p uniform over  {p : d_ap > min_n d_an},  or over all positives if that set is empty
        n uniform over  {n : d_an < max_p d_ap},  or over all negatives if that set is empty

    Each anchor has one triplet.

    Differs from the paper:
        The extremes in eqs. 21 and 22 of Roth et al. 2020 are distances here, not the samples that
        attain them. Eq. 22 describes the positive.

    Reference:
        Deep metric learning baselines (Roth & Brattoli, 2019); eqs. 21 and 22 of Roth et al. 2020.

    Shape:
        similarity (B, R) -> Triplets, B of them
    """

    gives = Triplets

    def __init__(self) -> None:
        super().__init__()
        self.dice = CounterRNG()

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        rows = len(similarity)
        first, second = self.dice(2 * rows).view(2, rows)
        far = pairs.positive & (similarity < masked_max(similarity, pairs.negative)[:, None])
        near = pairs.negative & (similarity > masked_min(similarity, pairs.positive)[:, None])
        positive, has_positive = draw(torch.where(far.any(-1, keepdim=True), far, pairs.positive), first)
        negative, has_negative = draw(torch.where(near.any(-1, keepdim=True), near, pairs.negative), second)
        return Triplets(torch.arange(rows, device=similarity.device), positive, negative, has_positive & has_negative)
