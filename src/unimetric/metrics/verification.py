"""Verification of pairs: true accept rate at a false accept rate, and equal error rate."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Count, Range
from unimetric.geometry.pair_scores import PairScores
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(needs=lambda space, **_: space.check_matches())
def verification(
    space: Space,
    *,
    far: Annotated[float, Range(0, below=1)] = 0.001,
    level: Annotated[float, Range(0, below=1)] = 0.0,
    draws: Count = 1000,
) -> dict[str, float]:
    """Points of the ROC curve over all pairs of a query and a gallery image.

        tar        fraction of the pairs of one class whose score exceeds the threshold
        threshold  the lowest score that at most a fraction `far` of the pairs of two classes exceeds
        eer        the larger of both error rates, at the threshold where it is smallest

    All pairs are used. Pairs that the group rule leaves out do not count.

    Reference:
        Labeled faces in the wild (Huang et al., 2007), for pairs; whole classes are drawn as in
        Efron and Tibshirani (1993), percentiles.

    Args:
        space: Embeddings.
        far: False accept rate: fraction of the pairs of two classes that may be accepted.
        level: Level of confidence intervals over whole classes, such as 0.95: `tar/from`, `tar/to` and
            those of the threshold. 0 for none. Fewer than eight classes have no interval: it would be too narrow.
        draws: Number of bootstrap draws.
    """
    pairs = PairScores(space)
    rates, equal = pairs.rates(pairs.threshold(far)), pairs.equal_error()
    values = {"tar": 1 - rates.fnmr, "threshold": rates.threshold, "eer": max(equal.fmr, equal.fnmr)}
    if level:
        drawn = pairs.resample(fmr=far, draws=draws)
        for name, each in (("tar", 1 - drawn.fnmr), ("threshold", drawn.threshold)):
            interval = pairs.interval(each, level)
            if interval is not None:
                values[f"{name}/from"], values[f"{name}/to"] = interval
    return values
