"""Balanced accuracy on unknown classes."""

from __future__ import annotations

from unimetric.arguments import Real
from unimetric.geometry.space import Space
from unimetric.kinds import metric
from unimetric.metrics._open_set import average_classes, find_unknown


@metric(needs=lambda space, threshold: find_unknown(space))
def baus(space: Space, *, threshold: Real = 0.5) -> float:
    """Fraction of the queries of an unknown class that are rejected, averaged over classes.

        mean over classes of  mean over queries of  [ score of the nearest <= threshold ]

    Reference:
        AnimalCLEF 2025 (Adam et al., LifeCLEF 2025): balanced accuracy on unknown samples.

    Args:
        space: Embeddings, with queries whose class is not in the gallery.
        threshold: Score that the nearest neighbor must exceed; otherwise the query counts as unknown.
    """
    unknown = find_unknown(space)
    return average_classes(space, unknown, space.nearest()[1][unknown] <= threshold)
