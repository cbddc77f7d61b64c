"""Random triplets."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.geometry import Dice, Pairs, Triplets, draw


class Random(nn.Module):
    """Random tuple mining; sec. 3.1 of Roth et al. 2020, after Hu et al., CVPR 2014.

        p evenly among the positives;  n evenly among the negatives

    One triplet an anchor, as in the paper. Differs from the authors' code, which lists every triplet and draws as many as the batch has
    samples: the same on average with equally many samples a class, without the list.
    """

    gives = Triplets

    def __init__(self) -> None:
        super().__init__()
        self.dice = Dice()

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        rows = len(similarity)
        first, second = self.dice(2 * rows).view(2, rows)
        positive, has_positive = draw(pairs.positive, first)
        negative, has_negative = draw(pairs.negative, second)
        return Triplets(torch.arange(rows, device=similarity.device), positive, negative, has_positive & has_negative)
