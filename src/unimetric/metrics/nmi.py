"""Normalised mutual information of clusters and classes."""

from __future__ import annotations

from unimetric.geometry.kmeans import overlap
from unimetric.geometry.space import Space


def nmi(space: Space, *, clusters: int | None = None, iterations: int = 20, seeding: str = "random") -> float:
    """How much the clusters that k-means finds tell about the classes, from 0 (nothing) to 1 (everything).

    Cluster ensembles (Strehl and Ghosh, JMLR 2002), normalised by the arithmetic mean; eq. 27 of Roth et al. 2020.

        2 I(class; cluster) / (H(class) + H(cluster))

    Differs from the printed equation, whose factor 2 stands in the wrong place, and from the authors' code, which makes as many clusters
    as there were training classes.

    Args:
        space: the embeddings; all of them are clustered, queries and gallery.
        clusters: how many; as many as classes, if not given.
        iterations: how often the centres of k-means move.
        seeding: "random" or "plusplus".
    """
    table = overlap(space.labels, space.clusters(k=clusters, iterations=iterations, seeding=seeding))
    entropies = table.entropy(table.classes) + table.entropy(table.clusters)
    return 2 * table.information() / entropies if entropies > 0 else 1.0
