"""The pair mining of the multi-similarity loss."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.geometry import Pairs, masked_max, masked_min


class MultiSimilarity(nn.Module):
    """Multi-similarity loss with general pair weighting, sec. 4.1 (Wang et al., CVPR 2019); eq. 11 of Roth et al. 2020.

        keep n where  s_an + epsilon > min_p s_ap;  keep p where  s_ap - epsilon < max_n s_an

    Args:
        epsilon: how far from its rivals' extreme a pair is still of interest.
    """

    gives = Pairs

    def __init__(self, *, epsilon: float = 0.1) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Pairs:
        weakest = masked_min(similarity, pairs.positive)[:, None]
        strongest = masked_max(similarity, pairs.negative)[:, None]
        # An anchor without positives keeps no negative (the minimum is +inf), and the other way round.
        return replace(
            pairs,
            positive=pairs.positive & (similarity - self.epsilon < strongest),
            negative=pairs.negative & (similarity + self.epsilon > weakest),
        )
