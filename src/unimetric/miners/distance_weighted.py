"""Distance-weighted sampling of negatives."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.arguments import NonNegative, Positive
from unimetric.geometry import CounterRNG, Pairs, Triplets, draw
from unimetric.kinds import Miner


class DistanceWeighted(Miner):
    """Sampling of negatives with equal probability at all distances.

        P(n | a) ~ 1 / q(max(d_an, cutoff)),   log q(d) = (D - 2) log d + (D - 3)/2 log(1 - d^2 / 4)

    q is the density of distances between uniform points on the unit sphere in D dimensions. Each
    anchor has one triplet, and its positive is drawn uniformly. An anchor without another sample of
    its class is its own positive.

    Differs from the paper:
        In eq. 23 of Roth et al. 2020, d must be squared inside q. The distance is clipped instead
        of the weight of eq. 24. Their code does not apply the upper cutoff of 1.4 that the text
        states. `upper_cutoff=1.4` applies it. If no negative is left, any negative may be drawn.

    Reference:
        Sampling matters in deep embedding learning (Wu et al., ICCV 2017); eqs. 23 and 24 of Roth
        et al. 2020.

    Args:
        cutoff: Lower bound to which smaller distances are raised.
        upper_cutoff: Distance above which negatives are not drawn. None draws all.

    Shape:
        similarity (B, R) -> Triplets, B of them
    """

    gives = Triplets

    def __init__(self, *, cutoff: NonNegative = 0.5, upper_cutoff: Positive | None = None) -> None:
        super().__init__()
        self.cutoff, self.upper_cutoff = cutoff, upper_cutoff
        self.dice = CounterRNG()

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        square = (2 - 2 * similarity.float()).clamp_min(max(self.cutoff**2, 1e-8))
        allowed = pairs.negative
        if self.upper_cutoff is not None:
            near = allowed & (square < self.upper_cutoff**2)
            found = near.any(-1, keepdim=True)
            allowed, square = torch.where(found, near, allowed), torch.where(found, square, 1)
        # 1/q = (d^2 (1 - d^2/4))^(-(D - 3)/2) / d needs one logarithm. The largest weight per row is scaled
        # to 1, because raw weights overflow above about 50 dimensions.
        log_weight = (3 - pairs.dim) / 2 * (square * (1 - square / 4).clamp_min(1e-8)).log()
        log_weight = torch.where(allowed, log_weight, -torch.inf)
        weight = (log_weight - log_weight.amax(-1, keepdim=True).clamp_min(-1e30)).exp() * square.rsqrt()
        rows = len(similarity)
        first, second = self.dice(2 * rows).view(2, rows)
        positive, has_positive = draw(pairs.positive, first)
        negative, has_negative = draw(weight, second)
        anchor = torch.arange(rows, device=similarity.device)
        return Triplets(anchor, torch.where(has_positive, positive, pairs.own), negative, has_negative)
