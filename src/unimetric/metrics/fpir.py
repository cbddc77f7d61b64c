"""False positive identification rate."""

from __future__ import annotations

from unimetric.arguments import Real
from unimetric.geometry.space import Average, Space
from unimetric.kinds import metric
from unimetric.metrics._open_set import find_unknown


@metric(better="lower", needs=lambda space, threshold: find_unknown(space))
def fpir(space: Space, *, threshold: Real = 0.5) -> float:
    """Fraction of the queries of unknown classes whose nearest neighbor exceeds the threshold.

        mean over queries without their class in the gallery of  [ score of the nearest > threshold ]

    Reference:
        Biometric performance testing and reporting (ISO/IEC 19795-1, 2021).

    Args:
        space: Embeddings, with queries whose class is not in the gallery.
        threshold: Score that the nearest neighbor must exceed: cosine, inner product or minus distance.
    """
    unknown = find_unknown(space)
    accepted = space.nearest()[1][unknown] > threshold
    return Average(accepted.double(), space.labels[space.query[unknown]])
