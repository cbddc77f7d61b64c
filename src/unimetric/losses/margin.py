"""Margin loss with a learnt boundary per class."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, full, mining, triplet_cosines


class Margin(nn.Module):
    """Sampling matters in deep embedding learning (Wu et al., ICCV 2017); eq. 10 of Roth et al. 2020.

        mean over active pairs of  [d(a, p) - beta_y + margin]_+  and  [beta_y - d(a, n) + margin]_+

    with d the Euclidean distance of unit vectors and beta_y a boundary learnt for the anchor's class.

    Differs from the printed equation: the hinge is restored and the sum is divided by the number of active pairs. The authors' code
    divides by the number of triplets with an active side (a logical or); `or_count=True` does as it does. PUMA's is
    `margin(learn_beta=False)` on `distance_weighted(upper_cutoff=1.4)`; its code has the miner `multi_similarity`, which looks like a slip.

    Args:
        margin: half of the width of the band around the boundary.
        beta: where the boundary starts.
        nu: weight of the penalty nu * sum of beta over the anchors.
        learn_beta: whether the boundary is learnt.
        or_count: divide by active triplets instead of active pairs; needs triplets.
        lr: learning rate of the boundary.
        num_classes: training classes; one boundary for all where it is not given.
        miner: which pairs; default `distance_weighted`.
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets, Pairs)

    def __init__(
        self,
        *,
        margin: float = 0.2,
        beta: float = 1.2,
        nu: float = 0.0,
        learn_beta: bool = True,
        or_count: bool = False,
        lr: float = 5e-4,
        num_classes: int | None = None,
        miner: str | nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.margin, self.nu, self.or_count, self.lr = margin, nu, or_count, lr
        self.beta = nn.Parameter(torch.full((num_classes or 1,), float(beta)), requires_grad=learn_beta)
        self.miner = mining(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        beta = self.beta.gather(0, labels) if len(self.beta) > 1 else self.beta.expand(len(labels))
        if self.miner.gives is Triplets:
            mined, near, far = triplet_cosines(self.miner, embeddings, labels, memory)
            boundary = beta.gather(0, mined.anchor)
            pull, push = euclidean(near) - boundary + self.margin, boundary - euclidean(far) + self.margin
            positive = negative = mined.valid
            anchors = torch.where(mined.valid, boundary, 0).sum()
        else:
            similarity, pairs = compare(full(embeddings), labels, memory)
            mined = self.miner(similarity.detach(), pairs)
            beyond = euclidean(similarity) - beta[:, None]
            pull, push = beyond + self.margin, self.margin - beyond
            positive, negative = mined.positive, mined.negative
            anchors = torch.where((positive | negative).any(-1), beta, 0).sum()
        pulled, pushed = positive & (pull > 0), negative & (push > 0)
        active = (pulled | pushed).sum() if self.or_count else pulled.sum() + pushed.sum()
        total = torch.where(pulled, pull, 0).sum() + torch.where(pushed, push, 0).sum()
        # Averaged over the active terms: solved pairs would drown the gradient of those that are not.
        return total / active.clamp_min(1) + self.nu * anchors
