"""Contrastive loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, full, mining, triplet_cosines


class Contrastive(nn.Module):
    """Dimensionality reduction by learning an invariant mapping (Hadsell et al., CVPR 2006); eq. 1 of Roth et al. 2020.

        mean over positive pairs of  [d(a, p) - positive_margin]_+   +   mean over negative pairs of  [margin - d(a, n)]_+

    with d the Euclidean distance of unit vectors, not squared.

    Differs from the printed equation: its second indicator gives the margin term to positives, and each part is a mean over the mined
    triplets, as in the authors' code. `cosine=True` is the form of XBM (Wang et al., CVPR 2020), on all pairs with a margin of 0.5:

        1/B  ( sum over positive pairs of  1 - s(a, p)   +   sum over negative pairs with s(a, n) > margin of  s(a, n) )

    Args:
        margin: distance beyond which a negative is let go; with `cosine`, the similarity below which it is.
        positive_margin: distance within which a positive is let go.
        active_only: average over the pairs that are not let go, as pytorch-metric-learning does.
        cosine: the form of XBM on similarities; reads neither `positive_margin` nor `active_only`.
        miner: which pairs; default `distance_weighted`. `all` takes every pair.
    """

    family = "pair"
    default_miner = "distance_weighted"
    reads = (Triplets, Pairs)

    def __init__(
        self,
        *,
        margin: float = 1.0,
        positive_margin: float = 0.0,
        active_only: bool = False,
        cosine: bool = False,
        miner: str | nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.margin, self.positive_margin, self.active_only, self.cosine = margin, positive_margin, active_only, cosine
        self.miner = mining(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        if self.miner.gives is Triplets:
            mined, near, far = triplet_cosines(self.miner, embeddings, labels, memory)
            positive = negative = mined.valid
            pulled = mined.valid & (near < 1)  # an anchor that is its own positive (rho, or alone in its class) is not, but it counts
        else:
            similarity, pairs = compare(full(embeddings), labels, memory)
            mined = self.miner(similarity.detach(), pairs)
            near = far = similarity
            positive, pulled, negative = mined.positive, mined.positive, mined.negative
        if self.cosine:
            pull = torch.where(pulled & (near < 1 - 1e-5), 1 - near, 0)
            return (pull.sum() + torch.where(negative & (far > self.margin), far, 0).sum()) / len(labels)
        reach = euclidean(near)
        pull = torch.where(pulled, (reach - self.positive_margin).relu(), 0)
        push = torch.where(negative, (self.margin - (reach if near is far else euclidean(far))).relu(), 0)
        if self.active_only:
            positive, negative = pull > 0, push > 0
        return pull.sum() / positive.sum().clamp_min(1) + push.sum() / negative.sum().clamp_min(1)
