"""Triplet loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, full, masked_mean, mining, pick, triplet_hinges


class Triplet(nn.Module):
    """FaceNet (Schroff et al., CVPR 2015); eq. 2 of Roth et al. 2020.

        mean over triplets of  [d(a, p)^2 - d(a, n)^2 + margin]_+

    with d the Euclidean distance of unit vectors.

    Differs from the printed equation: distances are squared, as in the code that made the paper's numbers; `squared=False` is the
    equation. The mean counts solved triplets, unless `active_only`.

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
        similarity, pairs = compare(full(embeddings), labels, memory)
        distance = 2 - 2 * similarity if self.squared else euclidean(similarity)
        mined = self.miner(similarity.detach(), pairs)
        if isinstance(mined, Triplets):
            hinge = pick(distance, mined.anchor, mined.positive) - pick(distance, mined.anchor, mined.negative) + self.margin
            counted = mined.valid & (hinge > 0) if self.active_only else mined.valid
            return masked_mean(hinge.relu(), counted)
        total, active, every = triplet_hinges(distance, distance, mined, self.margin)
        return total / (active if self.active_only else every).clamp_min(1)
