"""N-pair loss."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from unimetric.arguments import NonNegative, Positive
from unimetric.geometry import CounterRNG, Memory, draw, exclusion, gram, length, masked_mean, match, upcast_half
from unimetric.kinds import Loss


class NPair(Loss):
    """Softmax of one positive against all negatives, on inner products of raw embeddings.

        mean over anchors of  log(1 + sum_n exp(g_a . g_n - g_a . g_p))   +   nu mean |g|

    g are the raw embeddings. One positive p is drawn per anchor, and every sample of another class
    is a negative n. Anchors without a positive are skipped. Evaluation uses the Euclidean distance
    of raw embeddings, as the code of Roth et al. does.

    Differs from the paper:
        Two differences from eq. 4 of Roth et al. 2020 follow their code. One positive is drawn
        instead of using all (`all_positives=True` averages over every positive pair), and the norm
        is not squared. The equation also omits a star, so that it prints g_a . f_n instead of
        g_a . g_n. For BN-Inception, their code divides the embeddings by 4, which is `scale=0.25`.

    Reference:
        Improved deep metric learning with multi-class N-pair loss objective (Sohn, NeurIPS 2016);
        eq. 4 of Roth et al. 2020.

    Args:
        nu: Weight of the mean norm, which limits the growth of raw embeddings.
        scale: Factor applied to the embeddings first. Use 0.25 with BN-Inception, as Roth et al.
            do.
        all_positives: Use every positive pair instead of one drawn positive per anchor.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"

    def __init__(self, *, nu: NonNegative = 0.005, scale: Positive = 1.0, all_positives: bool = False) -> None:
        super().__init__()
        self.nu, self.scale, self.all_positives = nu, scale, all_positives
        self.dice = CounterRNG()

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = upcast_half(embeddings) if self.scale == 1 else upcast_half(embeddings) * self.scale
        product = gram(embeddings) if memory is None else embeddings @ (upcast_half(memory.embeddings) * self.scale).T  # (B, R)
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        if self.all_positives:
            rivals = (product + exclusion(product, pairs.negative)).logsumexp(-1)  # (B,)
            contrast = masked_mean(softplus(rivals[:, None] - product), pairs.positive)
        else:
            positive, has_positive = draw(pairs.positive, self.dice(len(labels)))
            # log(1 + sum exp(negative - positive)) is the cross entropy over the drawn positive and all negatives.
            drawn = torch.arange(product.shape[1], device=product.device) == positive[:, None]  # faster than `scatter`, if compiled
            logits = product + exclusion(product, pairs.negative | drawn)
            target = positive.masked_fill(~has_positive, -100)  # which cross_entropy skips
            contrast = cross_entropy(logits, target, reduction="sum") / has_positive.sum().clamp_min(1)
        return contrast if self.nu == 0 else contrast + self.nu * length(embeddings).mean()

    def placed(self, embeddings: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
        """Return the raw embeddings and the geometry in which evaluation compares them."""
        return embeddings, {"geometry": "euclidean"}
