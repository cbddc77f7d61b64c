"""Recall over one gallery of all datasets."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.geometry.space import Space
from unimetric.kinds import metric
from unimetric.metrics.recall import recall


@metric(depth=lambda space, k: k)
def unified(space: Space, *, k: Count = 1) -> float:
    """Fraction of queries with a match among the k nearest neighbors of all datasets.

        recall at k of all test queries against all test galleries

    Classes of different datasets never match, whatever their labels. In the published code of PUMA,
    test labels of several datasets collide, and a hit in the wrong dataset can count.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023),
        section 5.1, "unified accuracy".

    Args:
        space: Embeddings of all datasets, with `source`.
        k: Number of neighbors.
    """
    return recall(space, k=k)
