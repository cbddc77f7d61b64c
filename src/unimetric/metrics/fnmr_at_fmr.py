"""False non-match rate at a false match rate."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Range
from unimetric.geometry.pair_scores import PairScores
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(better="lower", needs=lambda space, fmr: space.check_matches())
def fnmr_at_fmr(space: Space, *, fmr: Annotated[float, Range(0, below=1)] = 0.001) -> float:
    """Fraction of the pairs of one class that are rejected, at a given rate of false matches.

        (pairs of one class with score <= t) / (pairs of one class)

    t is the lowest score that at most a fraction `fmr` of the pairs of two classes exceeds.

    Reference:
        Biometric performance testing and reporting (ISO/IEC 19795-1, 2021).

    Args:
        space: Embeddings.
        fmr: False match rate: fraction of the pairs of two classes that may be accepted.
    """
    pairs = PairScores(space)
    return pairs.rates(pairs.threshold(fmr)).fnmr
