"""Margin loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Count, NonNegative, Real
from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, triplet_cosines, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class Margin(Loss):
    """Margin loss with a learned distance threshold per class.

        mean over active pairs of  [d(a, p) - beta_y + margin]_+  and  [beta_y - d(a, n) + margin]_+

    d is the Euclidean distance between normalized embeddings; beta_y is the threshold of the
    anchor's class.

    Differs from the paper:
        Eq. 10 of Roth et al. 2020 omits the hinge. The sum is divided by the number of active
        pairs; the authors' code divides by triplets with an active side (`or_count=True`). The
        default value is 0.72 to 1.0 times theirs. Alone this only rescales the loss, but inside
        `s2sd` and `diva` it changes the weight of the terms. PUMA describes
        `margin(learn_beta=False)` with `distance_weighted(upper_cutoff=1.4)`; its code uses the
        `multi_similarity` miner, probably a bug.

    Reference:
        Sampling matters in deep embedding learning (Wu et al., ICCV 2017); eq. 10 of Roth
        et al. 2020.

    Args:
        margin: Half-width of the band around the threshold.
        beta: Initial threshold.
        nu: Weight of the penalty on the sum of the anchors' thresholds.
        learn_beta: Whether the thresholds are trained.
        or_count: Divide by active triplets instead of active pairs. Requires a triplet miner.
        lr: Learning rate of the thresholds.
        num_classes: Number of training classes. If omitted, all classes share one threshold.
        miner: Miner spec string. Defaults to `distance_weighted`.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets, Pairs)
    needs_triplets = "or_count"

    def __init__(
        self,
        *,
        margin: Real = 0.2,
        beta: Real = 1.2,
        nu: NonNegative = 0.0,
        learn_beta: bool = True,
        or_count: bool = False,
        lr: NonNegative = 5e-4,
        num_classes: Count | None = None,
        miner: str | nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.margin, self.nu, self.or_count, self.lr = margin, nu, or_count, lr
        self.beta = nn.Parameter(torch.full((num_classes or 1,), float(beta)), requires_grad=learn_beta)
        self.miner = resolve_miner(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        beta = self.beta.gather(0, labels) if len(self.beta) > 1 else self.beta.expand(len(labels))
        if self.miner.gives is Triplets:
            mined, near, far = triplet_cosines(self.miner, embeddings, labels, memory)
            boundary = beta.gather(0, mined.anchor)
            pull, push = euclidean(near) - boundary + self.margin, boundary - euclidean(far) + self.margin
            positive = negative = mined.valid
            anchors = torch.where(mined.valid, boundary, 0).sum()
        else:
            similarity, pairs = compare(upcast_half(embeddings), labels, memory)
            mined = self.miner(similarity.detach(), pairs)
            beyond = euclidean(similarity) - beta[:, None]
            pull, push = beyond + self.margin, self.margin - beyond
            positive, negative = mined.positive, mined.negative
            anchors = torch.where((positive | negative).any(-1), beta, 0).sum()
        pulled, pushed = positive & (pull > 0), negative & (push > 0)
        active = (pulled | pushed).sum() if self.or_count else pulled.sum() + pushed.sum()
        total = torch.where(pulled, pull, 0).sum() + torch.where(pushed, push, 0).sum()
        # Average over the active terms only. Solved pairs would dilute the gradient of the others.
        return total / active.clamp_min(1) + self.nu * anchors
