"""K-means on any device: any number of clusters, bounded memory, deterministic.

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
    """Result of k-means.

    Args:
        centers: (K, D) cluster centers.
        cluster: (N,) index of the nearest center. Ties go to the lower index.
        objective: Sum of squared distances to the nearest center.
    """

    centers: Float[Tensor, "K D"]
    cluster: Int[Tensor, "N"]
    objective: Float[Tensor, ""]


def kmeans(
    points: Float[Tensor, "N D"], k: int, *, iterations: int = 20, seeding: str = "random", seed: int = 0, memory: int = 1 << 29
) -> Clusters:
    """Cluster points with Lloyd's algorithm.

        repeat: each point to its nearest center, each center to the mean of its points

    A center without points moves to the point farthest from its assigned center, the next empty one
    to the next farthest. Nothing synchronizes with the GPU. Sums have a fixed order, so the result
    is deterministic for a seed.

    Reference:
        Least squares quantization in PCM (Lloyd, 1982); seeding of Arthur and Vassilvitskii, SODA
        2007.

    Args:
        points: (N, D) points.
        k: Number of clusters, at most N.
        iterations: Number of center updates.
        seeding: "random" (distinct points, as in faiss) or "plusplus" (each next point with
            probability proportional to its squared distance).
        seed: Seed of the initial centers.
        memory: Bytes for the products of points and centers.
    """
    if seeding not in SEEDINGS:
        raise UnimetricError(f"unknown seeding `{seeding}`", closest(seeding, SEEDINGS))
    if not 0 < k <= len(points):
        raise UnimetricError(
            f"`k` must be between 1 and the number of points, got {k} clusters of {len(points)} points",
            f"use a number of clusters from 1 to {len(points)}",
        )
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same seeds on every device
    if seeding == "random":
        centers = points[torch.randperm(len(points), generator=generator)[:k].to(points.device)]
    else:
        centers = _seed_plusplus(points, k, generator)
    square = points.square().sum(1)
    for _ in range(iterations):
        cluster, score = assign(points, centers, memory=memory)
        centers = _means(points, cluster, square - 2 * score, k)
    cluster, score = assign(points, centers, memory=memory)
    return Clusters(centers, cluster, (square - 2 * score).clamp_min(0).to(torch.float64).sum())


def assign(points: Float[Tensor, "N D"], centers: Float[Tensor, "K D"], *, memory: int) -> tuple[Int[Tensor, "N"], Float[Tensor, "N"]]:
    """Return the nearest center of each point and its score <x, c> - |c|^2 / 2.

    The nearest center has the largest score.
    """
    half = centers.square().sum(1) / 2
    rows = max(1, min(len(points), memory // (2 * points.element_size() * len(centers))))
    room = points.new_empty(rows, len(centers))
    found = []
    for start in range(0, len(points), rows):
        some = points[start : start + rows]
        with exactly(points.device):
            product = torch.mm(some, centers.T, out=room[: len(some)]).sub_(half)
        found.append(best(product, 1))
    score, cluster = (torch.cat(parts)[:, 0] for parts in zip(*found, strict=True))
    return cluster, score


def _means(points: Float[Tensor, "N D"], cluster: Int[Tensor, "N"], distance: Float[Tensor, "N"], k: int) -> Float[Tensor, "K D"]:
    order = cluster.argsort(stable=True)
    count = torch.bincount(cluster, minlength=k)
    # index_add_ uses atomics, whose order of addition varies; that would change the last digit of an
    # NMI. Sums of sorted runs are deterministic.
    total = torch.segment_reduce(points[order], "sum", lengths=count, axis=0, unsafe=True)
    empty = count == 0
    farthest = distance.argsort(descending=True, stable=True)
    return torch.where(empty[:, None], points[farthest[(empty.cumsum(0) - 1).clamp_min(0)]], total / count.clamp_min(1)[:, None])


def _seed_plusplus(points: Float[Tensor, "N D"], k: int, generator: torch.Generator) -> Float[Tensor, "K D"]:
    numbers = torch.rand(k, generator=generator, dtype=torch.float64).to(points.device)
    centers = points.new_empty(k, points.shape[1])
    centers[0] = points[(numbers[:1] * len(points)).long()][0]
    distance = torch.full((len(points),), torch.inf, dtype=torch.float64, device=points.device)
    for number in range(1, k):
        distance = torch.minimum(distance, (points - centers[number - 1]).square().sum(1).to(torch.float64))
        running = distance.cumsum(0)
        row = torch.searchsorted(running, numbers[number] * running[-1], right=True)
        centers[number] = points[row.clamp_max(len(points) - 1)]
    return centers


@dataclass(frozen=True)
class Overlap:
    """Overlap between two partitions of the same images, as counts on the CPU in float64.

    Args:
        cells: (T,) number of images in each nonempty pair of a class and a cluster.
        cell_class: (T,) number of images in the class of that pair.
        cell_cluster: (T,) number of images in its cluster.
        classes: (C,) number of images in each class.
        clusters: (K,) number of images in each nonempty cluster.
    """

    cells: Float[Tensor, "T"]
    cell_class: Float[Tensor, "T"]
    cell_cluster: Float[Tensor, "T"]
    classes: Float[Tensor, "C"]
    clusters: Float[Tensor, "K"]

    def entropy(self, counts: Float[Tensor, "C"]) -> float:
        """Return the entropy H of a partition, in nats."""
        fraction = counts / counts.sum()
        return float(-(fraction * fraction.log()).sum())

    def pairs(self, counts: Float[Tensor, "C"]) -> float:
        """Return the number of image pairs that a partition keeps together."""
        return float((counts * (counts - 1) / 2).sum())

    def information(self) -> float:
        """Return the mutual information I(class; cluster), in nats."""
        total = self.cells.sum()
        return float((self.cells / total * (total * self.cells / (self.cell_class * self.cell_cluster)).log()).sum().clamp_min(0))

    def chance(self) -> float:
        """Return the mutual information expected by chance (Vinh et al., JMLR 2010, eq. 24a).

        Sizes repeat, so the sum runs over distinct sizes instead of every class and cluster.
        """
        total = self.classes.sum()
        sizes, times = self.clusters.unique(return_counts=True)
        expected = torch.zeros((), dtype=torch.float64)
        for size, count in zip(*self.classes.unique(return_counts=True), strict=True):
            shared = torch.arange(1, int(size) + 1, dtype=torch.float64)[:, None]  # (n, sizes): how many images they may share
            ways = _choose(size, shared) + _choose(total - size, sizes - shared) - _choose(total, sizes)
            term = shared / total * (total * shared / (size * sizes)).log() * ways.exp()
            expected += count * (times * term.where((shared <= sizes) & (sizes - shared <= total - size), 0)).sum()
        return float(expected)


def overlap(classes: Int[Tensor, "N"], clusters: Int[Tensor, "N"]) -> Overlap:
    """Count the images that each class and each cluster share, without empty cells."""
    size_class, size_cluster = torch.bincount(classes), torch.bincount(clusters)
    cell, count = torch.unique(classes * len(size_cluster) + clusters, return_counts=True)
    rows, columns = cell // len(size_cluster), cell % len(size_cluster)
    sizes = (count, size_class[rows], size_cluster[columns], size_class[size_class > 0], size_cluster[size_cluster > 0])
    return Overlap(*(values.to("cpu", torch.float64) for values in sizes))


def _choose(n: Tensor, k: Tensor) -> Tensor:
    """Return log of n over k. The caller must mask the result for k outside 0..n."""
    inside = torch.minimum(k.clamp_min(0), n)
    return torch.lgamma(n + 1) - torch.lgamma(inside + 1) - torch.lgamma(n - inside + 1)
