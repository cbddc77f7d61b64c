"""F1 of clusters and classes."""

from __future__ import annotations

from unimetric.geometry.kmeans import overlap
from unimetric.geometry.space import Space


def f1(space: Space, *, clusters: int | None = None, iterations: int = 20, seeding: str = "random") -> float:
    """How well the pairs of pictures that k-means puts together are the pairs of one class: harmonic mean of precision and recall.

    Introduction to information retrieval (Manning et al., 2008), section 16.3; eq. 28 of Roth et al. 2020.

        2 T / (pairs of one class + pairs of one cluster),   T = pairs of one class and one cluster

    Differs from the paper's text, which says that it is computed "over nearest neighbour retrieval": the authors' code clusters. It also
    swaps the names of precision and recall, which changes nothing.

    Args:
        space: the embeddings; all of them are clustered, queries and gallery.
        clusters: how many; as many as classes, if not given.
        iterations: how often the centres of k-means move.
        seeding: "random" or "plusplus".
    """
    table = overlap(space.labels, space.clusters(k=clusters, iterations=iterations, seeding=seeding))
    together, same_class, same_cluster = (table.pairs(counts) for counts in (table.cells, table.classes, table.clusters))
    # Every picture alone in its class and in its cluster: no pair is wrong.
    return 2 * together / (same_class + same_cluster) if same_class + same_cluster > 0 else 1.0
