"""Adjusted mutual information of clusters and classes."""

from __future__ import annotations

from typing import Literal

from unimetric.arguments import Count
from unimetric.geometry.kmeans import overlap
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric()
def ami(space: Space, *, clusters: Count | None = None, iterations: Count = 20, seeding: Literal["random", "plusplus"] = "random") -> float:
    """Chance-adjusted agreement of k-means clusters and classes: 0 is chance, 1 is perfect.

        (I - E[I]) / ((H(class) + H(cluster)) / 2 - E[I])

    Unlike NMI, it does not grow with the number of clusters: many small classes score near 0 in a
    random space. Normalized by the arithmetic mean.

    Reference:
        Information theoretic measures for clusterings comparison (Vinh et al., JMLR 2010).

    Args:
        space: Embeddings. All are clustered, queries and gallery.
        clusters: Number of clusters. Defaults to the number of classes.
        iterations: Number of center updates of k-means.
        seeding: "random" or "plusplus".
    """
    table = overlap(space.labels, space.clusters(k=clusters, iterations=iterations, seeding=seeding))
    chance = table.chance()
    room = (table.entropy(table.classes) + table.entropy(table.clusters)) / 2 - chance
    # Without room, there is one class and one cluster, or each image is alone in both. The two
    # partitions are then equal.
    return (table.information() - chance) / room if abs(room) > 1e-12 else 1.0
