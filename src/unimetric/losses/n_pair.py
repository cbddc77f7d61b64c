"""N-pair loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

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
        references = embeddings if memory is None else full(memory.embeddings) * self.scale
        product = gram(embeddings) if memory is None else embeddings @ references.T  # (B, R)
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        rivals = log_sum_exp(product, pairs.negative)  # (B,)
        if self.all_positives:
            contrast = masked_mean(softplus(rivals[:, None] - product), pairs.positive)
        else:
            positive, has_positive = draw(pairs.positive, self.dice(len(labels)))
            own = (embeddings * references.index_select(0, positive)).sum(-1)  # made again from its vectors: no gradient of one entry a row
            contrast = masked_mean(softplus(rivals - own), has_positive)
        return contrast + self.nu * torch.linalg.vector_norm(embeddings, dim=-1).mean()
