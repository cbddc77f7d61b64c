"""Re-ranking: reorder neighbors by the neighbors they share, before metrics are computed.

N images, K neighbors, M members of a set, R rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.geometry.nearest import nearest
from unimetric.geometry.space import Space


def reranked(space: Space, *, k1: int = 20, k2: int = 6, weight: float = 0.3, depth: int = 100) -> Space:
    """Return the same space with the first neighbors of each query in k-reciprocal order.

        distance = (1 - weight) * Jaccard(V_query, V_item) + weight * d(query, item)

    V of an image holds exp(-d) of its k1 reciprocal neighbors. Neighbors of a neighbor are added if
    two thirds of them are shared. V is scaled to sum 1 and averaged over the k2 nearest neighbors.
    d is the squared distance divided by the largest one of the image (in the Poincaré ball: the
    distance).

    Differs from the authors' code:
        V is stored as lists of its members, and only the first `depth` neighbors are reordered, so
        that no (N, N) matrix is created. Neighbors beyond `depth` keep their order.

    Reference:
        Re-ranking person re-identification with k-reciprocal encoding (Zhong et al., CVPR 2017).

    Args:
        space: Embeddings. Neighbors come from queries and gallery.
        k1: Number of neighbors that may be reciprocal.
        k2: Number of neighbors over which V is averaged.
        weight: Weight of the original distance. 1 changes nothing.
        depth: Number of neighbors per query that are reordered.
    """
    if space.geometry == "inner":
        raise UnimetricError("re-ranking needs distances, got inner products", 'build the space with `geometry="cosine"`')
    return space.reordered(_Reciprocal(space, k1, k2, weight, depth))


def check_rerank(images: int, *, k1: int = 20, k2: int = 6) -> None:
    """Raise an error if there are too few images to re-rank.

    Args:
        images: Number of images in queries and gallery together.
        k1: Number of neighbors that may be reciprocal.
        k2: Number of neighbors over which an image is averaged.
    """
    if not 0 < k2 <= k1:
        raise UnimetricError(f"re-ranking requires 0 < k2 <= k1, got k1={k1} and k2={k2}", "use 0 < k2 <= k1, such as k1=20, k2=6")
    if images <= k1:
        raise UnimetricError(
            f"re-ranking uses the {k1} nearest others of each image, but there are only {images} images",
            f"evaluate at least {k1 + 1} images, or remove `--rerank`; in Python, `reranked` accepts a smaller `k1`",
        )


class _Reciprocal:
    def __init__(self, space: Space, k1: int, k2: int, weight: float, depth: int) -> None:
        check_rerank(space.size, k1=k1, k2=k2)
        self.space, self.k1, self.k2, self.weight, self.depth = space, k1, k2, weight, depth
        self.ask, self.answer = space.sides()
        every = torch.arange(space.size, device=space.device)
        found = nearest(self.ask, self.answer, k1, own=every, memory=space.memory)
        self.near = torch.cat([every[:, None], torch.cat([near for _, _, near in found])], 1)  # (N, k1 + 1), itself first
        opposite = nearest(-self.ask, self.answer, 1, memory=space.memory)
        self.largest = self._distance(every[:, None], torch.cat([far for _, _, far in opposite]))[:, 0].clamp_min(1e-12)
        half = round(k1 / 2)
        mutual, mutual_half = self._mutual(k1), self._mutual(half)
        step = self._rows((k1 + 1) ** 2 * (half + 1))
        self.members, self.memberships = self._pack([self._encode(rows, mutual, mutual_half, half) for rows in step])
        if k2 > 1:
            step = self._rows(k2 * self.members.shape[1])
            self.members, self.memberships = self._pack([self._blend(rows, k2) for rows in step])

    def again(self, space: Space) -> _Reciprocal:
        """Return the k-reciprocal order of a subspace, computed from its images only."""
        return _Reciprocal(space, self.k1, self.k2, self.weight, self.depth)

    def _rows(self, numbers: int) -> Iterator[Int[Tensor, "R"]]:
        """Yield row indices, as many at a time as the memory allows for this many numbers per row."""
        every = torch.arange(self.space.size, device=self.space.device)
        yield from every.split(max(1, self.space.memory // (64 * numbers)))

    def _distance(self, rows: Int[Tensor, "R 1"], columns: Int[Tensor, "R M"]) -> Float[Tensor, "R M"]:
        space = self.space
        if space.geometry == "cosine":  # of binary codes, `sides` are the signs
            return (2 - 2 * torch.einsum("re,rme->rm", space.points[rows[:, 0]], space.points[columns])).clamp_min(0)
        score = torch.einsum("re,rme->rm", self.ask[rows[:, 0]], self.answer[columns])
        square = self.ask[rows[:, 0], : space.points.shape[1]].square().sum(1, keepdim=True)
        if space.geometry == "euclidean":
            return (square - 2 * score).clamp_min(0)
        bend = 1 - space.curvature * square / 4  # the coordinates of a query are doubled
        return (1 - 2 * space.curvature * score / bend).clamp_min(1).acosh()

    def _mutual(self, k: int) -> Bool[Tensor, "N K"]:
        """Return which of the k neighbors of an image have it among theirs."""
        near = self.near[:, : k + 1]
        return torch.cat([(near[near[rows]] == rows[:, None, None]).any(2) for rows in self._rows((k + 1) ** 2)])

    def _encode(
        self, rows: Int[Tensor, "R"], mutual: Bool[Tensor, "N K"], mutual_half: Bool[Tensor, "N L"], half: int
    ) -> tuple[Int[Tensor, "R M"], Float[Tensor, "R M"]]:
        own, own_mask = self.near[rows], mutual[rows]
        theirs, theirs_mask = self.near[own][:, :, : half + 1], mutual_half[own]  # (R, k1 + 1, half + 1)
        shared = ((theirs[:, :, :, None] == own[:, None, None, :]) & own_mask[:, None, None, :]).any(3) & theirs_mask
        # Integer arithmetic makes the comparison exact: two thirds of three are two.
        joins = own_mask & (3 * shared.sum(2) > 2 * theirs_mask.sum(2))
        members = torch.cat([own, theirs.flatten(1)], 1)
        mask = torch.cat([own_mask, (theirs_mask & joins[:, :, None]).flatten(1)], 1)
        members = members.where(mask, self.space.size).sort(dim=1).values
        fresh = torch.nn.functional.pad(members[:, 1:] != members[:, :-1], (1, 0), value=True) & (members < self.space.size)
        members = members.where(fresh, self.space.size).sort(dim=1).values
        members = members[:, : int(fresh.sum(1).max())]
        inside = members < self.space.size
        distance = self._distance(rows[:, None], members.where(inside, 0)) / self.largest[rows, None]
        memberships = (-distance).exp().where(inside, 0)
        return members, memberships / memberships.sum(1, keepdim=True)

    def _blend(self, rows: Int[Tensor, "R"], k2: int) -> tuple[Int[Tensor, "R M"], Float[Tensor, "R M"]]:
        near = self.near[rows, :k2]
        members, order = self.members[near].flatten(1).sort(dim=1)
        memberships = (self.memberships[near] / k2).flatten(1).gather(1, order)
        fresh = torch.nn.functional.pad(members[:, 1:] != members[:, :-1], (1, 0), value=True)
        slot = fresh.cumsum(1) - 1  # equal members share a slot, in which their memberships are summed
        total = torch.zeros_like(memberships).scatter_add_(1, slot, memberships)
        first = torch.full_like(members, self.space.size).scatter_(1, slot, members)
        width = int((first < self.space.size).sum(1).max())
        return first[:, :width], total[:, :width]

    def _pack(self, parts: list[tuple[Int[Tensor, "R M"], Float[Tensor, "R M"]]]) -> tuple[Int[Tensor, "N M"], Float[Tensor, "N M"]]:
        """Stack sets into one table as wide as the largest set.

        Smaller sets are padded with member N of membership zero.
        """
        width, pad = max(members.shape[1] for members, _ in parts), torch.nn.functional.pad
        members = torch.cat([pad(members, (0, width - members.shape[1]), value=self.space.size) for members, _ in parts])
        return members, torch.cat([pad(memberships, (0, width - memberships.shape[1])) for _, memberships in parts])

    def __call__(self, start: int, near: Int[Tensor, "R K"]) -> Int[Tensor, "R K"]:
        depth = min(self.depth, near.shape[1])
        space, width = self.space, self.members.shape[1]
        parts = []
        step = max(1, space.memory // (8 * space.size + 64 * depth * max(width, self.answer.shape[1])))
        for offset in range(0, len(near), step):
            rows = space.query[start + offset : start + offset + step][: len(near) - offset]
            some = near[offset : offset + len(rows), :depth]
            item = space.gallery[some.clamp_min(0)]
            own = self.memberships.new_zeros(len(rows), space.size + 1).scatter_(1, self.members[rows], self.memberships[rows])
            common = torch.minimum(own.gather(1, self.members[item].flatten(1)).view(*item.shape, width), self.memberships[item]).sum(2)
            straight = self._distance(rows[:, None], item) / self.largest[rows, None]
            distance = (1 - self.weight) * (1 - common / (2 - common)) + self.weight * straight
            order = distance.where(some >= 0, torch.inf).sort(dim=1, stable=True).indices
            parts.append(torch.cat([some.gather(1, order), near[offset : offset + len(rows), depth:]], 1))
        return torch.cat(parts)
