"""Precision at k."""

from __future__ import annotations

from unimetric.geometry.space import Space


def precision(space: Space, *, k: int = 1) -> float:
    """Which share of the k nearest neighbours is of the query's own class.

    Introduction to information retrieval (Manning et al., 2008), section 8.4.

        mean over queries of  (matches of rank <= k) / k

    Places beyond the end of the gallery count as misses. With k=1 this is recall at 1.

    Args:
        space: the embeddings.
        k: how many neighbours are looked at.
    """
    return space.average(k, lambda hits: hits.count(k) / k)
