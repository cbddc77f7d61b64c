"""Semi-hard negatives."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.geometry import Dice, Pairs, Triplets, draw, euclidean


class Semihard(nn.Module):
    """FaceNet (Schroff et al., CVPR 2015); eq. 20 of Roth et al. 2020.

        p evenly among the positives;  n evenly among  {n : d_ap < d_an < d_ap + margin},  or among all negatives where there is none

    with d the Euclidean distance of unit vectors. One triplet an anchor. Differs from the printed equation: it lacks the upper bound.

    Args:
        margin: width of the band; the margin of the loss.
    """

    gives = Triplets

    def __init__(self, *, margin: float = 0.2) -> None:
        super().__init__()
        self.margin = margin
        self.dice = Dice()

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        rows = len(similarity)
        first, second = self.dice(2 * rows).view(2, rows)
        anchor = torch.arange(rows, device=similarity.device)
        distance = euclidean(similarity, epsilon=0.0)
        positive, has_positive = draw(pairs.positive, first)
        reach = distance.gather(1, positive[:, None])
        band = (pairs.negative & (distance > reach) & (distance < reach + self.margin)).float()
        found = band.amax(-1, keepdim=True) > 0
        negative, has_negative = draw(torch.where(found, band, pairs.negative.float()), second)
        return Triplets(anchor, positive, negative, has_positive & has_negative)
