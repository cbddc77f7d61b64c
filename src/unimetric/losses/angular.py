"""Angular loss."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from unimetric.arguments import NonNegative, Range
from unimetric.geometry import CounterRNG, Memory, draw, exclusion, gram, length, masked_mean, match, unit, upcast_half
from unimetric.kinds import Loss


class Angular(Loss):
    """N-pair loss plus a bound on the angle at the negative.

        mean over anchors of  log(1 + sum_n exp(g_a . g_n - g_a . g_p))
                              + weight log(1 + sum_n exp(h(a, p, n)))   +   nu mean |g|

        h(a, p, n) = 4 tan^2(alpha) (f_a + f_p) . f_n - 2 (1 + tan^2(alpha)) f_a . f_p

    g are the raw embeddings, f the normalized ones. One positive p is drawn per anchor, and every
    sample of another class is a negative n. Anchors without a positive are skipped. Evaluation uses
    the Euclidean distance of raw embeddings, as the code of Roth et al. does.

    Differs from the paper:
        Eq. 5 of Roth et al. 2020 is misprinted. Here tan^2 applies to alpha alone, the last product
        is f_a . f_p, and both terms of h are inside exp. The exponent of the first term is clamped
        to [-50, 50], as in their code.

    Reference:
        Deep metric learning with angular loss (Wang et al., ICCV 2017); eq. 5 of Roth et al. 2020.

    Args:
        alpha: Upper bound of the angle at the negative, in degrees.
        weight: Weight of the angular term; lambda in the paper.
        nu: Weight of the mean norm, which limits the growth of raw embeddings.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"

    def __init__(
        self, *, alpha: Annotated[float, Range(above=0, below=90)] = 45.0, weight: NonNegative = 2.0, nu: NonNegative = 0.005
    ) -> None:
        super().__init__()
        self.alpha, self.weight, self.nu = alpha, weight, nu
        self.dice = CounterRNG()

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        raw = upcast_half(embeddings)
        lengths = length(raw)[:, 0]
        inverse = lengths.clamp_min(1e-6).reciprocal()[:, None]
        pairs = match(labels, memory, dim=raw.shape[-1])
        positive, has_positive = draw(pairs.positive, self.dice(len(labels)))
        anchors = raw * inverse
        if memory is None:
            references, others = raw, anchors
            product = gram(raw)  # (B, R)
            similarity = product * inverse * inverse.T
            partners = similarity.index_select(0, positive)  # (B, R): of each anchor's positive
        else:
            references, others = upcast_half(memory.embeddings), unit(upcast_half(memory.embeddings))
            product, similarity = raw @ references.T, anchors @ others.T
            partners = others.index_select(0, positive) @ others.T

        excluded = exclusion(product, pairs.negative)
        # Recompute the positive's entries from the vectors. Indexing would scatter one gradient per row.
        own = (raw * references.index_select(0, positive)).sum(-1)
        n_pair = ((product - own[:, None]).clamp(-50, 50) + excluded).logsumexp(-1)
        square = math.tan(math.radians(self.alpha)) ** 2
        near = (anchors * others.index_select(0, positive)).sum(-1)
        angular = torch.add(excluded, similarity + partners, alpha=4 * square).logsumexp(-1) - 2 * (1 + square) * near
        each = softplus(n_pair) + self.weight * softplus(angular)
        total = masked_mean(each, has_positive)
        return total if self.nu == 0 else total + self.nu * lengths.mean()

    def placed(self, embeddings: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
        """Return the raw embeddings and the geometry in which evaluation compares them."""
        return embeddings, {"geometry": "euclidean"}
