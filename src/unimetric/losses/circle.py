"""Circle loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.arguments import Positive, Real
from unimetric.geometry import Memory, Pairs, compact_rows, compare, log_sum_exp, masked_mean, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class Circle(Loss):
    """Softplus over all pairs of an anchor, each weighted by its distance from the optimum.

        mean over anchors of
            log(1 + sum_n exp(scale w_n (s_an - margin)) sum_p exp(-scale w_p (s_ap - 1 + margin)))

        w_p = [1 + margin - s_ap]_+,   w_n = [s_an + margin]_+,   both without gradient

    s is the cosine similarity. Anchors without positives or without negatives are skipped. The
    defaults are the paper's for fine-grained image retrieval. The paper uses margin 0.25 and scale
    256 for faces, and margin 0.25 and scale 128 for persons.

    Reference:
        Circle loss: a unified perspective of pair similarity optimization (Sun et al., CVPR 2020),
        eq. 6.

    Args:
        margin: Radius of the circle; m in the paper.
        scale: Inverse temperature; gamma in the paper.
        miner: Miner spec string. Defaults to `all`.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"
    default_miner = "all"
    reads = (Pairs,)

    def __init__(self, *, margin: Real = 0.4, scale: Positive = 80.0, miner: str | nn.Module | None = None) -> None:
        super().__init__()
        self.margin, self.scale = margin, scale
        self.miner = resolve_miner(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)
        pairs = self.miner(similarity.detach(), pairs)
        near, counted = compact_rows(similarity, pairs.positive)
        pull = (1 + self.margin - near.detach()).relu() * (1 - self.margin - near)  # (B, M)
        push = (similarity.detach() + self.margin).relu() * (similarity - self.margin)  # (B, R)
        both = log_sum_exp(self.scale * pull, counted) + log_sum_exp(self.scale * push, pairs.negative)  # (B,)
        return masked_mean(softplus(both), pairs.positive.any(-1) & pairs.negative.any(-1))
