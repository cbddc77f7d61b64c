"""Semi-hard negatives."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.arguments import NonNegative
from unimetric.geometry import CounterRNG, Pairs, Triplets, draw, euclidean
from unimetric.kinds import Miner


class Semihard(Miner):
    """Sampling of negatives that are farther than the positive, but within the margin.

        p uniform over the positives
        n uniform over {n : d_ap < d_an < d_ap + margin}, or over all negatives if that set is empty

    d is the Euclidean distance between normalized embeddings. Each anchor has one triplet.

    Differs from the paper:
        Eq. 20 of Roth et al. 2020 omits the upper bound.

    Reference:
        FaceNet: a unified embedding for face recognition and clustering (Schroff et al., CVPR
        2015); eq. 20 of Roth et al. 2020.

    Args:
        margin: Width of the band. Use the margin of the loss.

    Shape:
        similarity (B, R) -> Triplets, B of them
    """

    gives = Triplets

    def __init__(self, *, margin: NonNegative = 0.2) -> None:
        super().__init__()
        self.margin = margin
        self.dice = CounterRNG()

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
