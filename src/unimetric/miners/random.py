"""Random triplets."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.geometry import CounterRNG, Pairs, Triplets, draw
from unimetric.kinds import Miner


class Random(Miner):
    """Uniform sampling of one positive and one negative per anchor.

        p uniform over the positives;   n uniform over the negatives

    Differs from the paper:
        The code of Roth et al. lists every triplet and draws as many as the batch has samples. With
        equally many samples per class, the expectation is the same.

    Reference:
        Discriminative deep metric learning for face verification in the wild (Hu et al., CVPR
        2014); sec. 3.1 of Roth et al. 2020.

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
        positive, has_positive = draw(pairs.positive, first)
        negative, has_negative = draw(pairs.negative, second)
        return Triplets(torch.arange(rows, device=similarity.device), positive, negative, has_positive & has_negative)
