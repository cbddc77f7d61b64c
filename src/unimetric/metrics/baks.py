"""Balanced accuracy on known classes."""

from __future__ import annotations

from unimetric.arguments import Real
from unimetric.geometry.space import Space
from unimetric.kinds import metric
from unimetric.metrics._open_set import average_classes, find_known


@metric(needs=lambda space, threshold: find_known(space))
def baks(space: Space, *, threshold: Real = 0.5) -> float:
    """Fraction of the queries of a known class that are recognized, averaged over classes.

        mean over classes of  mean over queries of  [ the nearest matches, with a score > threshold ]

    Reference:
        AnimalCLEF 2025 (Adam et al., LifeCLEF 2025): balanced accuracy on known samples.

    Args:
        space: Embeddings.
        threshold: Score that the nearest neighbor must exceed; otherwise the query counts as unknown.
    """
    known = find_known(space)
    near, scores = space.nearest()
    right = (space.labels[near.clamp_min(0)] == space.labels[space.query]) & (scores > threshold)
    return average_classes(space, known, right[known])
