"""Triplet loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Real
from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, masked_mean, triplet_cosines, triplet_hinges, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class Triplet(Loss):
    """Hinge on the difference of the positive and the negative distance of a triplet.

        mean over triplets of  [d(a, p)^2 - d(a, n)^2 + margin]_+

    d is the Euclidean distance between normalized embeddings.

    Differs from the paper:
        Distances are squared, as in the code that produced the results of Roth et al. 2020;
        `squared=False` is their equation. The mean includes triplets with zero loss, unless
        `active_only`. PUMA's loss, on cosines with a margin of 0.05, is half of
        `triplet(margin=0.1, active_only=True, miner='hardest')`.

    Reference:
        FaceNet: a unified embedding for face recognition and clustering (Schroff et al., CVPR
        2015); eq. 2 of Roth et al. 2020.

    Args:
        margin: Margin between the positive and the negative distance.
        squared: Use squared distances.
        active_only: Average over the triplets that violate the margin.
        miner: Miner spec string. Defaults to `distance_weighted`; `all` uses every triplet of the
            batch without building them.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets, Pairs)

    def __init__(
        self, *, margin: Real = 0.2, squared: bool = True, active_only: bool = False, miner: str | nn.Module | None = None
    ) -> None:
        super().__init__()
        self.margin, self.squared, self.active_only = margin, squared, active_only
        self.miner = resolve_miner(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        if self.miner.gives is Triplets:
            mined, near, far = triplet_cosines(self.miner, embeddings, labels, memory)
            hinge = (2 * (far - near) if self.squared else euclidean(near) - euclidean(far)) + self.margin
            return masked_mean(hinge.relu(), mined.valid & (hinge > 0) if self.active_only else mined.valid)
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)
        mined = self.miner(similarity.detach(), pairs)
        distance = 2 - 2 * similarity if self.squared else euclidean(similarity)
        total, active, every = triplet_hinges(distance, distance, mined, self.margin)
        return total / (active if self.active_only else every).clamp_min(1)
