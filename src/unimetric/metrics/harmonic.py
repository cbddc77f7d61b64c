"""Harmonic mean over datasets."""

from __future__ import annotations

from collections.abc import Iterable

from unimetric import kinds
from unimetric.geometry.space import Space
from unimetric.metrics.per_source import check_parts, inner_depth, per_source


@kinds.metric(depth=inner_depth, needs=check_parts)
def harmonic(space: Space, *, metric: str = "recall(k=1)") -> float:
    """Harmonic mean of the scores of all datasets. The worst dataset has the largest effect.

        n / sum over datasets of (1 / score)

    Most harmonic means printed in Table 2(b) of the paper do not follow from its columns; this is
    the formula.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023),
        section 5.1, "harmonic mean".

    Args:
        space: Embeddings of all datasets, with `source`.
        metric: Spec string of a metric over queries that returns one value, computed for each
            dataset with its queries and gallery.
    """
    return harmonic_mean(per_source(space, metric=metric).values())


def harmonic_mean(values: Iterable[float]) -> float:
    """Return n / sum(1 / x), or zero if any x is zero.

    >>> round(harmonic_mean([1.0, 0.5]), 4)
    0.6667
    """
    values = list(values)
    if min(values) <= 0:
        return 0.0
    return len(values) / sum(1 / value for value in values)
