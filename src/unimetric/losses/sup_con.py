"""Supervised contrastive loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Positive
from unimetric.geometry import Memory, at_most_zero, compare, log_sum_exp, masked_max, masked_mean, masked_sum, upcast_half
from unimetric.kinds import Loss


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
        count = pairs.positive.sum(-1)  # (B,)
        if not self.pairwise:
            everyone = log_sum_exp(logits, pairs.positive | pairs.negative)
            return masked_mean(everyone - masked_sum(logits, pairs.positive) / count.clamp_min(1), count > 0)
        names = labels if memory is None else memory.labels
        alike = names[:, None] == names[None, :] if memory is None else (names[:, None] == names[None, :]) & memory.valid
        view = alike.tril(-1).sum(-1)  # (R,) number of earlier samples of its class
        top = masked_max(logits.detach(), pairs.positive | pairs.negative)[:, None]
        logits = at_most_zero(logits - torch.where(top.isfinite(), top, 0))  # without the cap, the anchor itself would overflow
        rivals = torch.where(pairs.negative, logits.exp(), 0)
        # (B, R): column v sums an anchor's negatives of view v
        views = torch.zeros_like(rivals).scatter_add(1, view.expand_as(rivals), rivals)
        both = views.gather(1, view.expand_as(rivals)) + views.gather(1, view[pairs.own][:, None])
        tiny = torch.finfo(logits.dtype).tiny
        terms = (logits.exp() + both).clamp_min(tiny).log() - logits
        return torch.where(pairs.positive, terms, 0).sum().clamp_min(0) / (count + 1).sum()
