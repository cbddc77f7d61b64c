"""K-means on the device: any number of clusters, bounded memory, the same answer every time.

N points, D dimensions, K clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError, closest
from unimetric.geometry.nearest import best, exactly

SEEDINGS = ("random", "plusplus")


@dataclass(frozen=True)
class Clusters:
    """What k-means found.

    Args:
        centers: (K, D).
        cluster: (N,) which centre is nearest; the lower one of equals.
        objective: sum of squared distances to the nearest centre.
    """

    centers: Float[Tensor, "K D"]
    cluster: Int[Tensor, "N"]
    objective: Float[Tensor, ""]


def kmeans(
    points: Float[Tensor, "N D"], k: int, *, iterations: int = 20, seeding: str = "random", seed: int = 0, memory: int = 1 << 29
) -> Clusters:
    """Least squares quantization in PCM (Lloyd, 1982); seeding of Arthur and Vassilvitskii, SODA 2007.

        repeat: each point to its nearest centre, each centre to the mean of its points

    A centre without points moves to the point that lies farthest from its own centre, the next one to the next farthest. Nothing here
    waits for the device, and sums run in one order, so that a seed gives one answer.

    Args:
        points: (N, D).
        k: how many clusters, at most N.
        iterations: how often centres move.
        seeding: "random" (distinct points, as faiss does) or "plusplus" (each next point with probability of its squared distance).
        seed: of the seeding.
        memory: bytes for the products of points and centres.
    """
    if seeding not in SEEDINGS:
        raise UnimetricError(f"no seeding `{seeding}`", closest(seeding, SEEDINGS))
    if not 0 < k <= len(points):
        raise UnimetricError(f"{k} clusters of {len(points)} points", "give a number of clusters from 1 to the number of points")
    dice = torch.Generator().manual_seed(seed)  # on the CPU: the same seeds on every device
    centres = points[torch.randperm(len(points), generator=dice)[:k].to(points.device)] if seeding == "random" else _spread(points, k, dice)
    square = points.square().sum(1)
    for _ in range(iterations):
        cluster, score = assign(points, centres, memory=memory)
        centres = _means(points, cluster, square - 2 * score, k)
    cluster, score = assign(points, centres, memory=memory)
    return Clusters(centres, cluster, (square - 2 * score).clamp_min(0).to(torch.float64).sum())


def assign(points: Float[Tensor, "N D"], centres: Float[Tensor, "K D"], *, memory: int) -> tuple[Int[Tensor, "N"], Float[Tensor, "N"]]:
    """The nearest centre of each point and <x, c> - |c|^2 / 2, which is largest for it."""
    half = centres.square().sum(1) / 2
    rows = max(1, min(len(points), memory // (2 * points.element_size() * len(centres))))
    room = points.new_empty(rows, len(centres))
    found = []
    for start in range(0, len(points), rows):
        some = points[start : start + rows]
        with exactly(points.device):
            product = torch.mm(some, centres.T, out=room[: len(some)]).sub_(half)
        found.append(best(product, 1))
    score, cluster = (torch.cat(parts)[:, 0] for parts in zip(*found, strict=True))
    return cluster, score


def _means(points: Float[Tensor, "N D"], cluster: Int[Tensor, "N"], distance: Float[Tensor, "N"], k: int) -> Float[Tensor, "K D"]:
    order = cluster.argsort(stable=True)
    count = torch.bincount(cluster, minlength=k)
    # Sums of sorted runs rather than index_add_: atomics add in another order each time, and the last digit of an NMI would follow.
    total = torch.segment_reduce(points[order], "sum", lengths=count, axis=0, unsafe=True)
    empty = count == 0
    farthest = distance.argsort(descending=True, stable=True)
    return torch.where(empty[:, None], points[farthest[(empty.cumsum(0) - 1).clamp_min(0)]], total / count.clamp_min(1)[:, None])


def _spread(points: Float[Tensor, "N D"], k: int, dice: torch.Generator) -> Float[Tensor, "K D"]:
    numbers = torch.rand(k, generator=dice, dtype=torch.float64).to(points.device)
    centres = points.new_empty(k, points.shape[1])
    centres[0] = points[(numbers[:1] * len(points)).long()][0]
    distance = torch.full((len(points),), torch.inf, dtype=torch.float64, device=points.device)
    for number in range(1, k):
        distance = torch.minimum(distance, (points - centres[number - 1]).square().sum(1).to(torch.float64))
        running = distance.cumsum(0)
        place = torch.searchsorted(running, numbers[number] * running[-1], right=True)
        centres[number] = points[place.clamp_max(len(points) - 1)]
    return centres


@dataclass(frozen=True)
class Overlap:
    """How two divisions of the same pictures overlap: counts, on the CPU in float64.

    Args:
        cells: (T,) pictures in each pair of a class and a cluster that has any.
        cell_class: (T,) pictures in the class of that pair.
        cell_cluster: (T,) pictures in its cluster.
        classes: (C,) pictures in each class.
        clusters: (K,) pictures in each cluster that has any.
    """

    cells: Float[Tensor, "T"]
    cell_class: Float[Tensor, "T"]
    cell_cluster: Float[Tensor, "T"]
    classes: Float[Tensor, "C"]
    clusters: Float[Tensor, "K"]

    def entropy(self, counts: Float[Tensor, "C"]) -> float:
        """H of a division, in nats."""
        share = counts / counts.sum()
        return float(-(share * share.log()).sum())

    def pairs(self, counts: Float[Tensor, "C"]) -> float:
        """Pairs of pictures that a division keeps together."""
        return float((counts * (counts - 1) / 2).sum())

    def information(self) -> float:
        """I(class; cluster), in nats."""
        total = self.cells.sum()
        return float((self.cells / total * (total * self.cells / (self.cell_class * self.cell_cluster)).log()).sum().clamp_min(0))

    def chance(self) -> float:
        """The information that divisions of these sizes share by chance (Vinh et al., JMLR 2010, eq. 24a).

        Sizes repeat, so the sum runs over different sizes instead of over every class and cluster.
        """
        total = self.classes.sum()
        sizes, times = self.clusters.unique(return_counts=True)
        expected = torch.zeros((), dtype=torch.float64)
        for size, count in zip(*self.classes.unique(return_counts=True), strict=True):
            shared = torch.arange(1, int(size) + 1, dtype=torch.float64)[:, None]  # (n, sizes): how many pictures they may share
            ways = _choose(size, shared) + _choose(total - size, sizes - shared) - _choose(total, sizes)
            term = shared / total * (total * shared / (size * sizes)).log() * ways.exp()
            expected += count * (times * term.where((shared <= sizes) & (sizes - shared <= total - size), 0)).sum()
        return float(expected)


def overlap(classes: Int[Tensor, "N"], clusters: Int[Tensor, "N"]) -> Overlap:
    """The table of how many pictures each class and each cluster share, without its empty cells."""
    size_class, size_cluster = torch.bincount(classes), torch.bincount(clusters)
    cell, count = torch.unique(classes * len(size_cluster) + clusters, return_counts=True)
    rows, columns = cell // len(size_cluster), cell % len(size_cluster)
    sizes = (count, size_class[rows], size_cluster[columns], size_class[size_class > 0], size_cluster[size_cluster > 0])
    return Overlap(*(values.to("cpu", torch.float64) for values in sizes))


def _choose(n: Tensor, k: Tensor) -> Tensor:
    """log of n over k; what it gives where k is not within 0..n is for the caller to leave out."""
    inside = torch.minimum(k.clamp_min(0), n)
    return torch.lgamma(n + 1) - torch.lgamma(inside + 1) - torch.lgamma(n - inside + 1)
