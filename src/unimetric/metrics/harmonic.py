"""Harmonic mean over datasets."""

from __future__ import annotations

from collections.abc import Iterable

from unimetric.geometry.space import Space
from unimetric.metrics.per_source import per_source


def harmonic(space: Space, *, metric: str = "recall(k=1)") -> float:
    """How good the space is on every dataset: the harmonic mean of the datasets' own scores, which the worst of them pulls down most.

    Towards universal metric learning (PUMA, Kim et al. 2023): "harmonic mean".

        n / sum over datasets of (1 / score)

    Most harmonic means printed in the paper's Table 2(b) do not follow from its columns; this is the formula.

    Args:
        space: the embeddings of all datasets, with `source`.
        metric: a metric over queries that gives one number, taken of each dataset with its own queries and gallery.
    """
    return harmonic_mean(per_source(space, metric=metric).values())


def harmonic_mean(values: Iterable[float]) -> float:
    """n / sum(1 / x); zero if any x is.

    >>> round(harmonic_mean([1.0, 0.5]), 4)
    0.6667
    """
    values = list(values)
    return len(values) / sum(1 / value for value in values) if min(values) > 0 else 0.0
