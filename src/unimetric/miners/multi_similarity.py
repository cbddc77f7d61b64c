"""Pair mining of the multi-similarity loss."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from unimetric.arguments import Real
from unimetric.geometry import Pairs, masked_max, masked_min
from unimetric.kinds import Miner


class MultiSimilarity(Miner):
    """Selection of pairs that are harder than an anchor's extreme pair of the other type.

        select n if  s_an + epsilon > min_p s_ap;   select p if  s_ap - epsilon < max_n s_an

    Reference:
        Multi-similarity loss with general pair weighting (Wang et al., CVPR 2019), sec. 4.1; eq. 11
        of Roth et al. 2020.

    Args:
        epsilon: Tolerance of the comparison, in units of cosine similarity.

    Shape:
        similarity (B, R) -> Pairs
    """

    gives = Pairs

    def __init__(self, *, epsilon: Real = 0.1) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Pairs:
        weakest = masked_min(similarity, pairs.positive)[:, None]
        strongest = masked_max(similarity, pairs.negative)[:, None]
        # Without positives the minimum is +inf, so that no negative is selected, and vice versa.
        return replace(
            pairs,
            positive=pairs.positive & (similarity - self.epsilon < strongest),
            negative=pairs.negative & (similarity + self.epsilon > weakest),
        )
