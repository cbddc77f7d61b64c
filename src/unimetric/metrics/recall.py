"""Recall at k."""

from __future__ import annotations

from unimetric.geometry.space import Space


def recall(space: Space, *, k: int = 1) -> float:
    """How often at least one of the k nearest neighbours is of the query's own class.

    Product quantization for nearest neighbor search (Jegou et al., TPAMI 2011), as deep metric learning reports it since Song et al.,
    CVPR 2016.

        mean over queries of  [ some neighbour of rank <= k matches ]

    The query itself is left out by its index. The papers' code drops the first neighbour instead, which a duplicate picture can be.

    Args:
        space: the embeddings.
        k: how many neighbours are looked at; more than the gallery holds is all of it.
    """
    return space.average(k, lambda hits: hits.count(k) > 0)
