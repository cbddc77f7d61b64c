"""Hyperbolic metric learning: a pairwise softmax over distances in the Poincare ball."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, cosines, full, match, poincare, to_ball


class Hyperbolic(nn.Module):
    """Hyperbolic vision transformers: combining improvements in metric learning (Ermolov et al., CVPR 2022).

        sum over positive pairs (a, p) of  -log( exp(s_ap) / sum_{k in views of a and p, k != a} exp(s_ak) )  / number of classes

        s_ab = -distance(z_a, z_b) / temperature,   z = expmap_0(clip(x))

    on raw embeddings x. A view of a batch is one sample of each class: the first of each, the second of each, and so on. With two
    samples a class the denominator is all of the batch but the anchor. `curvature=0` is the sphere, s_ab = cos(x_a, x_b) / temperature.

    Differs from the paper: classes may differ in their number of samples. `average=True` is PUMA's code, which divides by the number of
    positive pairs with each sample's pair with itself counted in; its `SupCon` is `hyperbolic(curvature=0, temperature=0.1,
    average=True)`, and its `Hyp` has a temperature of 0.1.

    Args:
        temperature: divides the distances; the paper has 0.1 on the sphere.
        curvature: of the ball, whose radius is 1 / sqrt(curvature); 0 is the sphere.
        clip: largest norm of an embedding before it enters the ball; `None` does not clip.
        average: divide by the number of pairs, rather than of classes.
    """

    family = "pair"

    def __init__(self, *, temperature: float = 0.2, curvature: float = 0.1, clip: float | None = 2.3, average: bool = False) -> None:
        super().__init__()
        if curvature < 0:
            raise UnimetricError(f"hyperbolic: `curvature` is {curvature}", "write a number above 0, or 0 for the sphere")
        self.temperature, self.curvature, self.clip, self.average = temperature, curvature, clip, average

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = full(embeddings)
        pairs = match(labels, memory, dim=embeddings.shape[-1])
        score = self._closeness(embeddings, None if memory is None else memory.embeddings) / self.temperature  # (B, R)
        view = _views(labels if memory is None else torch.where(memory.valid, memory.labels, -1))  # (R,)
        group = _log_sum_exp_by(view, score, pairs.positive | pairs.negative)  # column v: over view v, the anchor left out
        own = group.gather(1, view[pairs.own][:, None])
        loss = torch.logaddexp(group.gather(1, view.expand_as(score)), own) - score
        total = torch.where(pairs.positive, loss, 0).sum()
        if self.average:
            return total / (pairs.positive.sum() + len(labels))
        return total / (_views(labels) == 0).sum()  # each class has one first sample

    def placed(self, embeddings: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
        """The points that neighbours are looked for among, and the geometry they lie in: what a `Space` is to be made of."""
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


def _views(labels: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
    """How many samples of the same class stand before each."""
    ordered, order = labels.sort(stable=True)
    rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(ordered, ordered)
    return torch.zeros_like(rank).scatter(0, order, rank)


def _log_sum_exp_by(view: Int[Tensor, "R"], score: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """log sum exp of each row's entries that count, apart for each view; a very low number, without gradient, where none does."""
    low = torch.finfo(score.dtype).min / 4
    view = view.expand_as(score)
    top = torch.full_like(score, low).scatter_reduce(1, view, torch.where(mask, score, low).detach(), "amax")
    # Capped at 0, so that entries that do not count cannot overflow on their way to being dropped.
    share = torch.where(mask, (score - top.gather(1, view)).clamp_max(0).exp(), 0)
    total = torch.zeros_like(score).scatter_add(1, view, share)
    return torch.where(total > 0, top + total.clamp_min(1).log(), low)
