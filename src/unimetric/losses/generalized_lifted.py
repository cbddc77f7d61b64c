"""Generalized lifted structure loss."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import NonNegative, Real
from unimetric.geometry import Memory, compact_rows, gram, length, log_sum_exp, masked_mean, match, upcast_half
from unimetric.kinds import Loss


class GeneralizedLifted(Loss):
    """Hinge on the soft maximum of positive distances and soft minimum of negative distances.

        mean over anchors of  [ log sum_p exp(d(a, p)) + log sum_n exp(margin - d(a, n)) ]_+
        + nu mean |g|

    d is the Euclidean distance of raw embeddings g. Anchors without a positive are skipped.
    Evaluation uses the same distance, as the code of Roth et al. does.

    Differs from the paper:
        Three differences from eq. 3 of Roth et al. 2020 follow their code. The loss is a mean over
        anchors instead of a sum, the norm is not squared, and an anchor is not its own positive.

    Reference:
        In defense of the triplet loss for person re-identification (Hermans et al., 2017), sec. 2,
        after Oh Song et al., CVPR 2016; eq. 3 of Roth et al. 2020.

    Args:
        margin: Distance that negatives should exceed; gamma in the paper.
        nu: Weight of the mean norm, which limits the growth of raw embeddings.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"

    def __init__(self, *, margin: Real = 1.0, nu: NonNegative = 0.005) -> None:
        super().__init__()
        self.margin, self.nu = margin, nu

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = upcast_half(embeddings)
        lengths = length(embeddings)[:, 0]
        if memory is None:
            product, reference_lengths = gram(embeddings), lengths
        else:
            references = upcast_half(memory.embeddings)
            product, reference_lengths = embeddings @ references.T, length(references)[:, 0]
        square = lengths.square()[:, None] + reference_lengths.square() - 2 * product
        distance = square.clamp_min(0).add(1e-8).sqrt()  # (B, R); the slope is at most 1e4 if two embeddings coincide
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        pull = log_sum_exp(*compact_rows(distance, pairs.positive))  # (B,)
        push = log_sum_exp(self.margin - distance, pairs.negative)
        lifted = masked_mean((pull + push).relu(), pairs.positive.any(-1))
        return lifted + self.nu * lengths.mean()

    def placed(self, embeddings: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
        """Return the raw embeddings and the geometry in which evaluation compares them."""
        return embeddings, {"geometry": "euclidean"}
