"""F1 of clusters and classes."""

from __future__ import annotations

from typing import Literal

from unimetric.arguments import Count
from unimetric.geometry.kmeans import overlap
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric()
def f1(space: Space, *, clusters: Count | None = None, iterations: Count = 20, seeding: Literal["random", "plusplus"] = "random") -> float:
    """Agreement of pairs within k-means clusters and pairs within classes: F1, from 0 to 1.

        2 T / (pairs of one class + pairs of one cluster),   T = pairs of one class and one cluster

    F1 is the harmonic mean of precision and recall.

    Differs from the paper:
        The text says that it is computed "over nearest neighbour retrieval"; the authors' code
        clusters. It also swaps the names of precision and recall, which changes nothing.

    Reference:
        Introduction to information retrieval (Manning et al., 2008), section 16.3; eq. 28 of Roth
        et al. 2020.

    Args:
        space: Embeddings. All are clustered, queries and gallery.
        clusters: Number of clusters. Defaults to the number of classes.
        iterations: Number of center updates of k-means.
        seeding: "random" or "plusplus".
    """
    table = overlap(space.labels, space.clusters(k=clusters, iterations=iterations, seeding=seeding))
    together, same_class, same_cluster = (table.pairs(counts) for counts in (table.cells, table.classes, table.clusters))
    # If every image is alone in its class and in its cluster, no pair is wrong.
    return 2 * together / (same_class + same_cluster) if same_class + same_cluster > 0 else 1.0
