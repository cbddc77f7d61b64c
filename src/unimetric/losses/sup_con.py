"""Supervised contrastive loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, compare, full, log_sum_exp, masked_max, masked_mean, masked_sum


class SupCon(nn.Module):
    """Supervised contrastive learning, eq. 2 (Khosla et al., NeurIPS 2020).

        mean over anchors of  -1/|P| sum_p log( exp(s_ap / temperature) / sum_{k != a} exp(s_ak / temperature) )

    with s the cosine similarity. Anchors alone in their class are skipped.

    `pairwise=True` is what PUMA (Kim et al.) calls SupCon: the InfoNCE of Hyp (Ermolov et al., CVPR 2022) on the sphere. The j-th sample
    of each class is its view j, and for an anchor of view i and a positive of view j only these two views are in the denominator:

        1/sum_a (|P| + 1)  sum over positive pairs of  -log( exp(s_ap / T) / (exp(s_ap / T) + sum_{n of view i or j} exp(s_an / T)) )

    The anchor itself counts in the divisor, as in the released code. With two samples a class both forms agree up to that divisor.

    Args:
        temperature: T; the smaller, the more the hardest pairs weigh.
        pairwise: PUMA's form.
    """

    family = "pair"

    def __init__(self, *, temperature: float = 0.1, pairwise: bool = False) -> None:
        super().__init__()
        self.temperature, self.pairwise = temperature, pairwise

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(full(embeddings), labels, memory)
        logits = similarity * (1 / self.temperature)  # (B, R)
        count = pairs.positive.sum(-1)  # (B,)
        if not self.pairwise:
            everyone = log_sum_exp(logits, pairs.positive | pairs.negative)
            return masked_mean(everyone - masked_sum(logits, pairs.positive) / count.clamp_min(1), count > 0)
        names = labels if memory is None else memory.labels
        alike = names[:, None] == names[None, :] if memory is None else (names[:, None] == names[None, :]) & memory.valid
        view = alike.tril(-1).sum(-1)  # (R,) how many of its class stand before it
        top = masked_max(logits.detach(), pairs.positive | pairs.negative)[:, None]
        logits = (logits - torch.where(top.isfinite(), top, 0)).clamp_max(0)  # the anchor itself would overflow
        rivals = torch.where(pairs.negative, logits.exp(), 0)
        # (B, R): column v sums an anchor's negatives of view v
        views = torch.zeros_like(rivals).scatter_add(1, view.expand_as(rivals), rivals)
        both = views.gather(1, view.expand_as(rivals)) + views.gather(1, view[pairs.own][:, None])
        tiny = torch.finfo(logits.dtype).tiny
        terms = (logits.exp() + both).clamp_min(tiny).log() - logits
        return torch.where(pairs.positive, terms, 0).sum().clamp_min(0) / (count + 1).sum()
