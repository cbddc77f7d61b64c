"""Multi-similarity loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.arguments import Positive, Real
from unimetric.geometry import Memory, Pairs, Triplets, as_pairs, compact_rows, compare, log_sum_exp, masked_mean, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class MultiSimilarity(Loss):
    """Softplus over mined positives and over mined negatives of each anchor.

        mean over selected anchors of  1/alpha log(1 + sum_p exp(-alpha (s_ap - base)))
                                       + 1/beta log(1 + sum_n exp(beta (s_an - base)))

    s is the cosine similarity. Anchors whose mined pairs lack a positive or a negative are skipped.

    Differs from the paper:
        Eq. 11 of Roth et al. 2020 swaps the extremes that select positives and negatives. A pair
        that is not selected is dropped instead of set to zero. The original code divides by the
        whole batch (`kept_only=False`), and so does CRT. PUMA's code runs
        `multi_similarity(beta=50.0, kept_only=False)` with `distance_weighted(upper_cutoff=1.4)`,
        probably a bug.

    Reference:
        Multi-similarity loss with general pair weighting (Wang et al., CVPR 2019); eqs. 11 and 12
        of Roth et al. 2020.

    Args:
        alpha: Inverse temperature of the positive term.
        beta: Inverse temperature of the negative term.
        base: Similarity threshold of both terms; lambda in the paper.
        kept_only: Average over anchors with selected pairs instead of over the batch.
        miner: Miner spec string. Triplets are read as pairs. Defaults to
            `multi_similarity(epsilon=0.1)`.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"
    default_miner = "multi_similarity(epsilon=0.1)"
    reads = (Pairs, Triplets)

    def __init__(
        self,
        *,
        alpha: Positive = 2.0,
        beta: Positive = 40.0,
        base: Real = 0.5,
        kept_only: bool = True,
        miner: str | nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.alpha, self.beta, self.base, self.kept_only = alpha, beta, base, kept_only
        self.miner = resolve_miner(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)  # (B, R)
        mined = self.miner(similarity.detach(), pairs)
        pairs = as_pairs(mined, pairs) if isinstance(mined, Triplets) else mined
        near, counted = compact_rows(similarity, pairs.positive)
        pull = softplus(log_sum_exp(-self.alpha * (near - self.base), counted)) / self.alpha  # (B,)
        push = softplus(log_sum_exp(self.beta * (similarity - self.base), pairs.negative)) / self.beta
        kept = pairs.positive.any(-1) & pairs.negative.any(-1)
        return masked_mean(pull + push, kept) if self.kept_only else ((pull + push) * kept).mean()
