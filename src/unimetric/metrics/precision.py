"""Precision at k."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(depth=lambda space, k: k)
def precision(space: Space, *, k: Count = 1) -> float:
    """Fraction of the k nearest neighbors that are of the query's class.

        mean over queries of  (matches of rank <= k) / k

    Ranks beyond the end of the gallery count as misses. With k=1, this is recall at 1.

    Reference:
        Introduction to information retrieval (Manning et al., 2008), section 8.4.

    Args:
        space: Embeddings.
        k: Number of neighbors.
    """
    return space.average(k, lambda hits: hits.count(k) / k)
