"""Adjusted Rand index of clusters whose number is not given."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from unimetric.arguments import Real
from unimetric.geometry.kmeans import overlap
from unimetric.geometry.nearest import exactly
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric()
def ari(space: Space, *, threshold: Real = 0.5) -> float:
    """Chance-adjusted agreement of linked images and classes: 0 is chance, 1 is perfect.

        (pairs together in both - expected) / (mean of the pairs together in each - expected)

    Two images are linked if their score exceeds the threshold, and a cluster is a set of images that
    links connect (single linkage). The number of classes is not used.

    Reference:
        Comparing partitions (Hubert and Arabie, Journal of Classification 1985).

    Args:
        space: Embeddings. All are clustered, queries and gallery. Groups have no effect.
        threshold: Score that links two images: cosine, inner product or minus distance.
    """
    table = overlap(space.labels, torch.from_numpy(link(space, threshold)).to(space.device))
    both, classes, clusters = (table.pairs(counts) for counts in (table.cells, table.classes, table.clusters))
    expected = classes * clusters / max(space.size * (space.size - 1) / 2, 1)
    room = (classes + clusters) / 2 - expected
    return (both - expected) / room if abs(room) > 1e-12 else 1.0


def link(space: Space, threshold: float) -> np.ndarray:
    """Return the (N,) cluster of every image.

    Images with a score above the threshold are in one cluster.

    Args:
        space: Embeddings.
        threshold: Score that links two images.
    """
    points = space.points if space.geometry == "cosine" else space.points.double()
    cluster = np.arange(space.size)
    step = max(1, space.memory // (64 * space.size))
    for start in range(0, space.size, step):
        with exactly(points.device):
            score = space.score_all(points[start : start + step], points)
        one, other = ((score > threshold).nonzero() + torch.tensor([start, 0], device=score.device)).cpu().numpy().T
        pairs = np.unique(np.stack([cluster[one], cluster[other]], 1), axis=0)  # clusters of earlier rows are linked already
        graph = coo_matrix((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), (space.size, space.size))
        cluster = connected_components(graph, directed=False)[1][cluster]
    return cluster
