"""N-pair loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from unimetric.geometry import Dice, Memory, draw, full, gram, log_sum_exp, masked_mean, match


class NPair(nn.Module):
    """Improved deep metric learning with multi-class N-pair loss objective (Sohn, NeurIPS 2016); eq. 4 of Roth et al. 2020.

        mean over anchors of  log(1 + sum_n exp(g_a . g_n - g_a . g_p))   +   nu mean |g|

    with raw embeddings g, one positive p drawn for each anchor, and every sample of another class as n. Anchors alone in their class are
    skipped.

    Differs from the printed equation, as the authors' code does: one positive rather than all (`all_positives=True` averages over every
    positive pair), the plain norm rather than its square; and g_a . g_n, where the equation lacks a star.

    Args:
        nu: weight of the mean norm, which keeps raw embeddings from growing.
        scale: factor on the embeddings before all else; 0.25 for BN-Inception in the authors' code.
        all_positives: every positive pair instead of one drawn for each anchor.
    """

    family = "tuple"

    def __init__(self, *, nu: float = 0.005, scale: float = 1.0, all_positives: bool = False) -> None:
        super().__init__()
        self.nu, self.scale, self.all_positives = nu, scale, all_positives
        self.dice = Dice()

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = full(embeddings) if self.scale == 1 else full(embeddings) * self.scale
        product = gram(embeddings) if memory is None else embeddings @ (full(memory.embeddings) * self.scale).T  # (B, R)
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        if self.all_positives:
            rivals = log_sum_exp(product, pairs.negative)  # (B,)
            contrast = masked_mean(softplus(rivals[:, None] - product), pairs.positive)
        else:
            # log(1 + sum_n exp(s_n - s_p)) is the cross entropy of p among p and the negatives.
            positive, has_positive = draw(pairs.positive, self.dice(len(labels)))
            among = pairs.negative.scatter(1, positive[:, None], True)
            logits = torch.where(among, product, torch.finfo(product.dtype).min)
            terms = cross_entropy(logits, torch.where(has_positive, positive, -1), ignore_index=-1, reduction="sum")
            contrast = terms / has_positive.sum().clamp_min(1)
        return contrast + self.nu * torch.linalg.vector_norm(embeddings, dim=-1).mean()
