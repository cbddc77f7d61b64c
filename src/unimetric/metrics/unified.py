"""Recall over one gallery of all datasets."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.metrics.recall import recall


def unified(space: Space, *, k: int = 1) -> float:
    """How often one of the k nearest neighbours is of the query's class when every dataset answers at once.

    Towards universal metric learning (PUMA, Kim et al. 2023): "unified accuracy".

        recall at k of all test queries against all test galleries

    Classes of different datasets never count as a match, whatever their labels: in PUMA's published code test labels of several datasets
    collide, and a hit in the wrong dataset can count.

    Args:
        space: the embeddings of all datasets, with `source`.
        k: how many neighbours are looked at.
    """
    return recall(space, k=k)
