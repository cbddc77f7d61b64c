"""False negative identification rate."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Count, Range, Real
from unimetric.geometry.space import Average, Space
from unimetric.kinds import metric
from unimetric.metrics._open_set import find_known, find_unknown, threshold_at


def _needs(space: Space, fpir: float, threshold: float | None, rank: int) -> None:
    find_known(space)
    if threshold is None:  # queries of unknown classes choose it
        find_unknown(space)


@metric(better="lower", needs=_needs)
def fnir(space: Space, *, fpir: Annotated[float, Range(0, below=1)] = 0.01, threshold: Real | None = None, rank: Count = 1) -> float:
    """Fraction of the queries of known classes without an accepted match in the first ranks.

        mean over queries with a match of  [ no match of rank <= `rank` has a score > threshold ]

    Reference:
        Biometric performance testing and reporting (ISO/IEC 19795-1, 2021).

    Args:
        space: Embeddings, with queries whose class is not in the gallery.
        fpir: Fraction of the queries of unknown classes that may be accepted. It chooses the threshold.
        threshold: Score that a match must exceed, instead of `fpir`.
        rank: Number of neighbors.
    """
    known = find_known(space)
    if threshold is None:
        threshold = threshold_at(space.nearest()[1][find_unknown(space)], fpir)
    near, scores = space.neighbors(min(rank, space.answers), scores=True)
    match = (space.labels[near.clamp_min(0)] == space.labels[space.query, None]) & (scores > threshold)
    return Average((~match.any(1))[known].double(), space.labels[space.query[known]])
