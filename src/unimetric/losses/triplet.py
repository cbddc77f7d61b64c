"""Triplet loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, full, masked_mean, mining, triplet_cosines, triplet_hinges


class Triplet(nn.Module):
    """FaceNet (Schroff et al., CVPR 2015); eq. 2 of Roth et al. 2020.

        mean over triplets of  [d(a, p)^2 - d(a, n)^2 + margin]_+

    with d the Euclidean distance of unit vectors.

    Differs from the printed equation: distances are squared, as in the code that made the paper's numbers; `squared=False` is the
    equation. The mean counts solved triplets, unless `active_only`. PUMA's, on cosines with a margin of 0.05, is half of
    `triplet(margin=0.1, active_only=True, miner='hardest')`.

    Args:
        margin: how much closer the positive must be.
        squared: squared distances.
        active_only: average over the triplets that violate the margin.
        miner: which triplets; default `distance_weighted`. `all` takes every triplet of the batch without building them.
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets, Pairs)

    def __init__(
        self, *, margin: float = 0.2, squared: bool = True, active_only: bool = False, miner: str | nn.Module | None = None
    ) -> None:
        super().__init__()
        self.margin, self.squared, self.active_only = margin, squared, active_only
        self.miner = mining(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        if self.miner.gives is Triplets:
            mined, near, far = triplet_cosines(self.miner, embeddings, labels, memory)
            hinge = (2 * (far - near) if self.squared else euclidean(near) - euclidean(far)) + self.margin
            return masked_mean(hinge.relu(), mined.valid & (hinge > 0) if self.active_only else mined.valid)
        similarity, pairs = compare(full(embeddings), labels, memory)
        mined = self.miner(similarity.detach(), pairs)
        distance = 2 - 2 * similarity if self.squared else euclidean(similarity)
        total, active, every = triplet_hinges(distance, distance, mined, self.margin)
        return total / (active if self.active_only else every).clamp_min(1)
