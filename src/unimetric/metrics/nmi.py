"""Normalized mutual information of clusters and classes."""

from __future__ import annotations

from typing import Literal

from unimetric.arguments import Count
from unimetric.geometry.kmeans import overlap
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric()
def nmi(space: Space, *, clusters: Count | None = None, iterations: Count = 20, seeding: Literal["random", "plusplus"] = "random") -> float:
    """Normalized mutual information of k-means clusters and classes, from 0 to 1.

        2 I(class; cluster) / (H(class) + H(cluster))

    Differs from the paper:
        The factor 2 of the printed equation is misplaced. The authors' code uses as many clusters
        as there were training classes.

    Reference:
        Cluster ensembles (Strehl and Ghosh, JMLR 2002), normalized by the arithmetic mean; eq. 27
        of Roth et al. 2020.

    Args:
        space: Embeddings. All are clustered, queries and gallery.
        clusters: Number of clusters. Defaults to the number of classes.
        iterations: Number of center updates of k-means.
        seeding: "random" or "plusplus".
    """
    table = overlap(space.labels, space.clusters(k=clusters, iterations=iterations, seeding=seeding))
    entropies = table.entropy(table.classes) + table.entropy(table.clusters)
    return 2 * table.information() / entropies if entropies > 0 else 1.0
