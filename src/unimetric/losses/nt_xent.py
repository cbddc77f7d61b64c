"""Normalized temperature-scaled cross entropy (NT-Xent)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.arguments import Positive
from unimetric.geometry import Memory, Pairs, compact_rows, compare, log_sum_exp, masked_mean, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class NTXent(Loss):
    """Cross entropy of each positive pair against all negatives of its anchor.

        mean over positive pairs of  -log( exp(s_ap / T) / (exp(s_ap / T) + sum_n exp(s_an / T)) )

    s is the cosine similarity and T the temperature.

    Differs from the paper:
        A class may have more than two samples. The other positives are then excluded from the
        denominator.

    Reference:
        A simple framework for contrastive learning of visual representations (Chen et al., ICML
        2020), eq. 1; InfoNCE (van den Oord et al., 2018) with labels.

    Args:
        temperature: Divisor T of the similarities. Smaller values give the hardest negatives more
            weight. SimCLR uses 0.1 for ImageNet, pytorch-metric-learning 0.07.
        miner: Miner spec string. Defaults to `all`.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"
    default_miner = "all"
    reads = (Pairs,)

    def __init__(self, *, temperature: Positive = 0.1, miner: str | nn.Module | None = None) -> None:
        super().__init__()
        self.temperature = temperature
        self.miner = resolve_miner(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)
        pairs = self.miner(similarity.detach(), pairs)
        logits = similarity * (1 / self.temperature)  # (B, R)
        rivals = log_sum_exp(logits, pairs.negative)  # (B,)
        near, counted = compact_rows(logits, pairs.positive)
        return masked_mean(softplus(rivals[:, None] - near), counted)
