"""Clusters of a gallery, whose number is not known."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from unimetric.arguments import Count
from unimetric.errors import counted
from unimetric.geometry.frechet import class_means
from unimetric.geometry.space import Space
from unimetric.kinds import Audited, Findings, Group

#: Clusters that are joined two at a time, and images whose silhouette is computed.
_SMALL, _SAMPLE = 1500, 4000
#: Principal components, and fraction of the largest silhouette that a partition must have.
_DIM, _CLEAR = 50, 0.92


def clusters(gallery: Audited, *, most: Count = 40, shown: Count = 8) -> Findings:
    """Groups of similar images, for a gallery without labels.

    Images are joined with their first neighbors, then small clusters with others, two at a time. The silhouette of a partition tells how
    much nearer images are to the mean of their cluster than to that of the next one. Of the partitions with at least 92 % of the largest
    silhouette, the one with the fewest clusters is chosen. Distances are those of 50 principal components.

        silhouette = mean over images of  (b - a) / max(a, b),   a: distance to its mean,  b: to the nearest other one

    Reference:
        Efficient parameter-free clustering using first neighbor relations (Sarfraz et al., CVPR 2019), then
        the method of Ward 1963; simplified silhouette (Rousseeuw 1987).

    Args:
        gallery: Images.
        most: Number of clusters that are shown, largest first.
        shown: Number of images per cluster that are shown, nearest to its mean first.
    """
    title, note = "Clusters", "Groups of similar images, found without labels. Their number is chosen by the silhouette."
    if len(gallery.ids) < 4:
        return Findings(title, note)
    points = _project(gallery.space.points.double())
    step = -(-len(points) // _SAMPLE)
    partitions = list(candidate_partitions(points))
    clear = [silhouette(points, each, step=step) for each in partitions]
    least = max(clear) - (1 - _CLEAR) * abs(max(clear))
    chosen = next(each for each, value in zip(partitions, clear, strict=True) if value >= least)
    sizes = np.bincount(chosen)
    means = _means(points, chosen)
    far = (points - means[torch.from_numpy(chosen)]).norm(dim=1).numpy()
    groups = []
    for number in np.argsort(-sizes, kind="stable")[:most]:
        rows = np.flatnonzero(chosen == number)
        rows = rows[np.argsort(far[rows], kind="stable")][:shown].tolist()
        labels = [str(gallery.labels[row]) if gallery.labels[row] is not None else "" for row in rows]
        groups.append(Group(f"cluster {number}: {counted(int(sizes[number]), 'image')}", [gallery.ids[row] for row in rows], labels))
    table = [
        {"id": id_, "cluster": int(number), "distance": round(float(distance), 5)}
        for id_, number, distance in zip(gallery.ids, chosen, far, strict=True)
    ]
    return Findings(title, f"{note} {len(sizes)} clusters.", groups, table)


def _project(points: torch.Tensor) -> torch.Tensor:
    """Return the directions of points from their mean, in at most `_DIM` principal components."""
    centered = points - points.mean(0)
    directions = torch.linalg.eigh(centered.mT @ centered)[1][:, -_DIM:]
    return torch.nn.functional.normalize(centered @ directions, dim=1)


def first_neighbor_partitions(points: torch.Tensor) -> list[np.ndarray]:
    """Return partitions (N,) from fine to coarse, each with at least two clusters."""
    found: list[np.ndarray] = []
    current, centers = np.arange(len(points)), points
    while len(centers) > 2:
        near = Space(centers.float(), np.zeros(len(centers), np.int64), geometry="euclidean").neighbors(1)[:, 0].numpy()
        links = coo_matrix((np.ones(len(near)), (np.arange(len(near)), near)), (len(near), len(near)))
        count, joined = connected_components(links, directed=False)
        if count < 2:
            break
        current = joined[current].astype(np.int64)
        found.append(current)
        centers = _means(points, current)
    return found or [np.zeros(len(points), np.int64)]


def candidate_partitions(points: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield partitions (N,) of few to many clusters."""
    levels = first_neighbor_partitions(points)
    start = next((level for level in levels if level.max() < _SMALL), levels[-1])
    count = int(start.max()) + 1
    if count < 3:
        yield start
        return
    tree = linkage(_means(points, start).numpy(), "ward")
    number = 2
    while number <= count:
        yield fcluster(tree, number, "maxclust").astype(np.int64)[start] - 1
        number = max(number + 1, int(1.05 * number))


def silhouette(points: torch.Tensor, partition: np.ndarray, *, step: int = 1) -> float:
    """Return the simplified silhouette of a partition: -1 to 1, and 0 for a single image."""
    count = int(partition.max()) + 1
    if count < 2:
        return -1.0
    means, sizes = _means(points, partition), np.bincount(partition)
    total = 0.0
    for some, own in zip(points[::step].split(4096), torch.from_numpy(partition[::step]).split(4096), strict=True):
        distance = torch.cdist(some, means)
        a = distance.gather(1, own[:, None])[:, 0]
        b = distance.scatter(1, own[:, None], torch.inf).amin(1)
        value = (b - a) / torch.maximum(a, b).clamp_min(1e-12)
        total += float(value[torch.from_numpy(sizes[own.numpy()] > 1)].sum())
    return total / len(points[::step])


def _means(points: torch.Tensor, partition: np.ndarray) -> torch.Tensor:
    return class_means(points, torch.from_numpy(partition), int(partition.max()) + 1)
