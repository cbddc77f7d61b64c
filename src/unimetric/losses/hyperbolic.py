"""Hyperbolic metric learning in the Poincaré ball."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.arguments import NonNegative, Positive
from unimetric.geometry import Memory, Pairs, at_most_zero, cosines, match, poincare, to_ball, upcast_half
from unimetric.kinds import Loss


class Hyperbolic(Loss):
    """Pairwise softmax over distances in the Poincaré ball.

        1 / (number of classes)  sum over positive pairs (a, p) of
            -log( exp(s_ap) / sum_{k in views of a and p, k != a} exp(s_ak) )

        s_ab = -distance(z_a, z_b) / temperature,   z = expmap_0(clip(x))

    x are the raw embeddings. A view of a batch contains one sample of each class. The first samples
    of the classes are view 1, the second samples view 2, and so on. With two samples per class, the
    denominator contains the whole batch except the anchor. `curvature=0` is the sphere, where s_ab
    = cos(x_a, x_b) / temperature. Evaluation uses the distance in the same geometry.

    Differs from the paper:
        Classes may have different numbers of samples. `average=True` is PUMA's code, which divides
        by the number of positive pairs plus the number of samples. PUMA's `SupCon` is
        `hyperbolic(curvature=0, temperature=0.1, average=True)`. PUMA's `Hyp` has a temperature of
        0.1.

    Reference:
        Hyperbolic vision transformers: combining improvements in metric learning (Ermolov et al.,
        CVPR 2022).

    Args:
        temperature: Divisor of the distances. The paper uses 0.1 on the sphere.
        curvature: Curvature c of the Poincaré ball, whose radius is 1 / sqrt(c); 0 is the sphere.
        clip: Largest norm of an embedding before it is mapped into the Poincaré ball. None disables
            clipping.
        average: Divide by the number of pairs instead of classes.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "pair"

    def __init__(
        self, *, temperature: Positive = 0.2, curvature: NonNegative = 0.1, clip: Positive | None = 2.3, average: bool = False
    ) -> None:
        super().__init__()
        self.temperature, self.curvature, self.clip, self.average = temperature, curvature, clip, average

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = upcast_half(embeddings)
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        score = self._closeness(embeddings, None if memory is None else memory.embeddings) / self.temperature  # (B, R)
        return contrast_views(score, pairs, labels, memory, average=self.average)

    def placed(self, embeddings: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
        """Return the points to search for neighbors, and the options of their `Space`."""
        if self.curvature == 0:
            return embeddings, {"geometry": "cosine"}
        points = to_ball(embeddings, curvature=self.curvature, clip=self.clip)
        return points, {"geometry": "poincare", "curvature": self.curvature}

    def _closeness(self, embeddings: Float[Tensor, "B D"], references: Float[Tensor, "R D"] | None) -> Float[Tensor, "B R"]:
        if self.curvature == 0:
            return cosines(embeddings, references)
        anchors = to_ball(embeddings, curvature=self.curvature, clip=self.clip)
        others = anchors if references is None else to_ball(references, curvature=self.curvature, clip=self.clip)
        return -poincare(anchors, others, curvature=self.curvature)


def contrast_views(
    score: Float[Tensor, "B R"], pairs: Pairs, labels: Int[Tensor, "B"], memory: Memory | None, *, average: bool
) -> Float[Tensor, ""]:
    """Return the cross entropy of positive pairs against the views of both samples.

    Divided by the number of classes, or with `average` by that of positive pairs and samples.
    """
    view = _views(labels if memory is None else torch.where(memory.valid, memory.labels, -1))  # (R,)
    group = _log_sum_exp_by(view, score, pairs.positive | pairs.negative)  # column v: over view v, without the anchor
    own = group.gather(1, view[pairs.own][:, None])
    loss = torch.logaddexp(group.gather(1, view.expand_as(score)), own) - score
    total = torch.where(pairs.positive, loss, 0).sum()
    if average:
        return total / (pairs.positive.sum() + len(labels))
    return total / (_views(labels) == 0).sum()  # each class has one first sample


def _views(labels: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
    """Return the number of earlier samples of the same class for each sample."""
    ordered, order = labels.sort(stable=True)
    rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(ordered, ordered)
    return torch.zeros_like(rank).scatter(0, order, rank)


def _log_sum_exp_by(view: Int[Tensor, "R"], score: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Return log sum exp of the masked entries per row and view.

    A view without entries has a very low constant.
    """
    low = torch.finfo(score.dtype).min / 4
    view = view.expand_as(score)
    top = torch.full_like(score, low).scatter_reduce(1, view, torch.where(mask, score, low).detach(), "amax")
    # Entries outside the mask are dropped below; the cap keeps them from overflowing first.
    share = torch.where(mask, at_most_zero(score - top.gather(1, view)).exp(), 0)
    total = torch.zeros_like(score).scatter_add(1, view, share)
    return torch.where(total > 0, top + torch.where(total > 0, total, 1).log(), low)
