"""Generalised lifted structure loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, few, full, gram, log_sum_exp, masked_mean, match


class GeneralizedLifted(nn.Module):
    """In defense of the triplet loss, sec. 2 (Hermans et al., 2017), after Song et al., CVPR 2016; eq. 3 of Roth et al. 2020.

        mean over anchors of  [ log sum_p exp(d(a, p)) + log sum_n exp(margin - d(a, n)) ]_+   +   nu mean |g|

    with d the Euclidean distance of raw embeddings g. Anchors alone in their class are skipped.

    Differs from the printed equation, as the authors' code does: a mean over anchors rather than a sum, the plain norm rather than its
    square, and an anchor is not its own positive.

    Args:
        margin: gamma in the paper.
        nu: weight of the mean norm, which keeps raw embeddings from growing.
    """

    family = "pair"

    def __init__(self, *, margin: float = 1.0, nu: float = 0.005) -> None:
        super().__init__()
        self.margin, self.nu = margin, nu

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = full(embeddings)
        lengths = torch.linalg.vector_norm(embeddings, dim=-1)
        if memory is None:
            product, reference_lengths = gram(embeddings), lengths
        else:
            references = full(memory.embeddings)
            product, reference_lengths = embeddings @ references.T, torch.linalg.vector_norm(references, dim=-1)
        square = lengths.square()[:, None] + reference_lengths.square() - 2 * product
        distance = square.clamp_min(0).add(1e-8).sqrt()  # (B, R); a slope of 1e4 at most where two are the same
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        pull = log_sum_exp(*few(distance, pairs.positive))  # (B,)
        push = log_sum_exp(self.margin - distance, pairs.negative)
        lifted = masked_mean((pull + push).relu(), pairs.positive.any(-1))
        return lifted + self.nu * lengths.mean()
