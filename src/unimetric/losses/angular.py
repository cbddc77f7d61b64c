"""Angular loss."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unimetric.geometry import Dice, Memory, draw, full, gram, match, unit


class Angular(nn.Module):
    """Deep metric learning with angular loss (Wang et al., ICCV 2017); eq. 5 of Roth et al. 2020.

        mean over anchors of  log(1 + sum_n exp(g_a . g_n - g_a . g_p))  +  weight log(1 + sum_n exp(h(a, p, n)))   +   nu mean |g|
        h(a, p, n) = 4 tan^2(alpha) (f_a + f_p) . f_n - 2 (1 + tan^2(alpha)) f_a . f_p

    with raw embeddings g, unit embeddings f, one positive p drawn for each anchor, and every sample of another class as n. Anchors alone
    in their class are skipped.

    Differs from the printed equation: tan^2 is of alpha alone, the last product is f_a . f_p, and both terms of h stand inside exp. The
    exponent of the first part is clamped to [-50, 50], as in the authors' code.

    Args:
        alpha: the angle at the negative, in degrees.
        weight: of the angular part; lambda in the paper.
        nu: weight of the mean norm, which keeps raw embeddings from growing.
    """

    family = "tuple"

    def __init__(self, *, alpha: float = 45.0, weight: float = 2.0, nu: float = 0.005) -> None:
        super().__init__()
        self.alpha, self.weight, self.nu = alpha, weight, nu
        self.dice = Dice()

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        raw = full(embeddings)
        lengths = torch.linalg.vector_norm(raw, dim=-1)
        inverse = lengths.clamp_min(1e-6).reciprocal()[:, None]
        pairs = match(labels, memory, dim=raw.shape[-1])
        positive, has_positive = draw(pairs.positive, self.dice(len(labels)))
        if memory is None:
            product = gram(raw)  # (B, R)
            similarity = product * inverse * inverse.T
            partners = similarity.index_select(0, positive)  # (B, R): of each anchor's positive
        else:
            references = unit(full(memory.embeddings))
            product, similarity = raw @ full(memory.embeddings).T, raw @ references.T * inverse
            partners = references.index_select(0, positive) @ references.T

        # log(1 + sum_n exp(rival_n - own)) is the cross entropy of the positive among itself and the negatives.
        def contrast(rivals: Tensor, own: Tensor) -> Tensor:
            logits = torch.where(pairs.negative, rivals, torch.finfo(rivals.dtype).min).scatter(1, positive[:, None], own)
            return cross_entropy(logits, torch.where(has_positive, positive, -1), ignore_index=-1, reduction="sum")

        own = product.gather(1, positive[:, None])
        n_pair = contrast((product - own).clamp(-50, 50), torch.zeros_like(own))
        square = math.tan(math.radians(self.alpha)) ** 2
        angular = contrast(4 * square * (similarity + partners), 2 * (1 + square) * similarity.gather(1, positive[:, None]))
        return (n_pair + self.weight * angular) / has_positive.sum().clamp_min(1) + self.nu * lengths.mean()
