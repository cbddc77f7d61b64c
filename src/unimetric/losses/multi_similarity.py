"""Multi-similarity loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, Pairs, Triplets, as_pairs, compare, few, full, log1p_sum_exp, masked_mean, mining


class MultiSimilarity(nn.Module):
    """Multi-similarity loss with general pair weighting (Wang et al., CVPR 2019); eqs. 11 and 12 of Roth et al. 2020.

        mean over kept anchors of  1/alpha log(1 + sum_p exp(-alpha (s_ap - base))) + 1/beta log(1 + sum_n exp(beta (s_an - base)))

    with s the cosine similarity. Anchors that keep no positive or no negative are skipped.

    Differs from the printed equation: eq. 11 confuses which side's extreme selects the other, and a pair that is not kept is dropped
    rather than set to zero. The original code divides by the whole batch (`kept_only=False`, used by CRT). PUMA's code runs
    `multi_similarity(beta=50.0, kept_only=False)` on `distance_weighted(upper_cutoff=1.4)`, which looks like a slip.

    Args:
        alpha: sharpness of the pull.
        beta: sharpness of the push.
        base: similarity at which pull and push meet; lambda in the paper.
        kept_only: average over anchors that kept pairs, rather than over the batch.
        miner: which pairs, or triplets for their pairs; default `multi_similarity(epsilon=0.1)`.
    """

    family = "pair"
    default_miner = "multi_similarity(epsilon=0.1)"
    reads = (Pairs, Triplets)

    def __init__(
        self,
        *,
        alpha: float = 2.0,
        beta: float = 40.0,
        base: float = 0.5,
        kept_only: bool = True,
        miner: str | nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.alpha, self.beta, self.base, self.kept_only = alpha, beta, base, kept_only
        self.miner = mining(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(full(embeddings), labels, memory)  # (B, R)
        mined = self.miner(similarity.detach(), pairs)
        pairs = as_pairs(mined, pairs) if isinstance(mined, Triplets) else mined
        near, counted = few(similarity, pairs.positive)
        pull = log1p_sum_exp(-self.alpha * (near - self.base), counted) / self.alpha  # (B,)
        push = log1p_sum_exp(self.beta * (similarity - self.base), pairs.negative) / self.beta
        kept = pairs.positive.any(-1) & pairs.negative.any(-1)
        return masked_mean(pull + push, kept) if self.kept_only else ((pull + push) * kept).mean()
