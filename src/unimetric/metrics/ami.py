"""Adjusted mutual information of clusters and classes."""

from __future__ import annotations

from unimetric.geometry.kmeans import overlap
from unimetric.geometry.space import Space


def ami(space: Space, *, clusters: int | None = None, iterations: int = 20, seeding: str = "random") -> float:
    """How much the clusters that k-means finds tell about the classes, beyond what clusters of these sizes tell by chance.

    Information theoretic measures for clusterings comparison (Vinh et al., JMLR 2010), with the arithmetic mean.

        (I - E[I]) / ((H(class) + H(cluster)) / 2 - E[I])

    Unlike NMI it does not grow with the number of clusters: many small classes score near 0 in a random space.

    Args:
        space: the embeddings; all of them are clustered, queries and gallery.
        clusters: how many; as many as classes, if not given.
        iterations: how often the centres of k-means move.
        seeding: "random" or "plusplus".
    """
    table = overlap(space.labels, space.clusters(k=clusters, iterations=iterations, seeding=seeding))
    chance = table.chance()
    room = (table.entropy(table.classes) + table.entropy(table.clusters)) / 2 - chance
    # No room: one class and one cluster, or each picture alone in both. The two divisions are then the same one.
    return (table.information() - chance) / room if abs(room) > 1e-12 else 1.0
