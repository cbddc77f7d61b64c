"""Normalised temperature-scaled cross entropy."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.geometry import Memory, Pairs, compare, few, full, log_sum_exp, masked_mean, mining


class NTXent(nn.Module):
    """NT-Xent, eq. 1 of SimCLR (Chen et al., ICML 2020); InfoNCE (van den Oord et al., 2018) with labels.

        mean over positive pairs of  -log( exp(s_ap / temperature) / (exp(s_ap / temperature) + sum_n exp(s_an / temperature)) )

    with s the cosine similarity.

    Differs from the paper in that a class may have more than two samples: the other positives are left out of the denominator.

    Args:
        temperature: the smaller, the more the hardest negatives weigh. 0.1 is SimCLR's for ImageNet; pytorch-metric-learning has 0.07.
        miner: which pairs; default `all`.
    """

    family = "pair"
    default_miner = "all"
    reads = (Pairs,)

    def __init__(self, *, temperature: float = 0.1, miner: str | nn.Module | None = None) -> None:
        super().__init__()
        self.temperature = temperature
        self.miner = mining(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(full(embeddings), labels, memory)
        pairs = self.miner(similarity.detach(), pairs)
        logits = similarity * (1 / self.temperature)  # (B, R)
        rivals = log_sum_exp(logits, pairs.negative)  # (B,)
        near, counted = few(logits, pairs.positive)
        return masked_mean(softplus(rivals[:, None] - near), counted)
