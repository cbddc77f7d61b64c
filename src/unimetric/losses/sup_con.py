"""Supervised contrastive loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Positive
from unimetric.geometry import Memory, compare, log_sum_exp, masked_mean, upcast_half
from unimetric.kinds import Loss
from unimetric.losses.hyperbolic import contrast_views


class SupCon(Loss):
    """Mean cross entropy of an anchor's positives against all other samples.

        mean over anchors of  -1/|P| sum_p log( exp(s_ap / T) / sum_{k != a} exp(s_ak / T) )

    s is the cosine similarity and T the temperature. Anchors without a positive are skipped.

    `pairwise=True` is PUMA's SupCon (Kim et al.), which is the InfoNCE of Hyp (Ermolov et al., CVPR
    2022) on the sphere. The j-th sample of each class is its view j. For an anchor of view i and a
    positive of view j, the denominator contains these two views only:

        1/sum_a (|P| + 1)  sum over positive pairs of
            -log( exp(s_ap / T) / (exp(s_ap / T) + sum_{n of view i or j} exp(s_an / T)) )

    The divisor counts the anchor itself, as in PUMA's code. With two samples per class, both forms
    are equal up to that divisor.

    Reference:
        Supervised contrastive learning (Khosla et al., NeurIPS 2020), eq. 2.

    Args:
        temperature: Divisor T of the similarities. Smaller values give the hardest pairs more
            weight.
        pairwise: Use PUMA's form.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"

    def __init__(self, *, temperature: Positive = 0.1, pairwise: bool = False) -> None:
        super().__init__()
        self.temperature, self.pairwise = temperature, pairwise

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)
        logits = similarity * (1 / self.temperature)  # (B, R)
        if self.pairwise:
            return contrast_views(logits, pairs, labels, memory, average=True)
        count = pairs.positive.sum(-1)  # (B,)
        everyone = log_sum_exp(logits, pairs.positive | pairs.negative)
        return masked_mean(everyone - torch.where(pairs.positive, logits, 0).sum(-1) / count.clamp_min(1), count > 0)
