"""Scores over increasing shifts: AGS, trend, and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from unimetric.errors import UnimetricError


class Trend(NamedTuple):
    """Linear trend over all methods and splits.

    Args:
        slope: Slope of the least-squares line.
        correlation: Pearson correlation, from -1 to 1. It is near 0 if the structure does not predict the score.
    """

    slope: float
    correlation: float


def structure_trend(structure: Float[np.ndarray, "M S"], scores: Float[np.ndarray, "M S"]) -> Trend:
    """Fit a line to a structure metric of the training embeddings and the test scores.

        x = (property - min) / (max - min),  y = (score - min) / (max - min),  over the methods of each split;  then one line through all

    Splits on which all methods have the same value are excluded.

    Reference:
        Sec. 4.2 and fig. 4 of Characterizing generalization under out-of-distribution shifts (Milbich et al., NeurIPS 2021).

    Args:
        structure: Structure metric, such as spectral decay, of each method (row) on each split (column).
        scores: Scores, such as recall@1, of each method (row) on each split (column).

    Returns:
        Slope and correlation.
    """
    kept = (np.ptp(structure, 0) > 0) & (np.ptp(scores, 0) > 0)
    if not kept.any():
        raise UnimetricError("a trend requires a split with two methods that differ", "compare at least two methods on the same splits")
    x, y = (((values - values.min(0)) / np.where(kept, np.ptp(values, 0), 1))[:, kept].ravel() for values in (structure, scores))
    x, y = x - x.mean(), y - y.mean()
    return Trend(float(x @ y / (x @ x)), float(x @ y / np.sqrt((x @ x) * (y @ y))))


def ags(distances: Sequence[float], scores: Sequence[float]) -> float:
    """Compute the aggregated generalization score (AGS).

        area under the scores over  x = (F - min F) / (max F - min F),  by the trapezoid rule

    The weight of a split is the range of shifts around it, so the number of splits does not matter. The paper does not state that the
    smallest distance is subtracted. It follows from its tables: without the subtraction, margin on CUB would be 56.6.

    Reference:
        Characterizing generalization under out-of-distribution shifts (Milbich et al., NeurIPS 2021).

    Args:
        distances: Frechet distance of each split, in any order.
        scores: Score of one method on each split, such as recall@1.

    Returns:
        The area, in the unit of the scores.

    >>> ags([10, 20, 40], [0.8, 0.7, 0.4])
    0.6166666666666667
    """
    x, y = np.asarray(distances, float), np.asarray(scores, float)
    if len(x) != len(y) or len(x) < 2 or x.min() == x.max():
        raise UnimetricError(
            f"AGS requires one score per distance and at least two different distances, got {len(x)} distances and {len(y)} scores",
            "use at least two splits of different distance",
        )
    order = np.argsort(x, kind="stable")
    x, y = (x[order] - x.min()) / (x.max() - x.min()), y[order]
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum())


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of its Student's t interval of 95 % (Student 1908).

    Args:
        values: At least two values.

    >>> mean, half = t_interval([0.6, 0.7, 0.8])
    >>> round(mean, 6), round(half, 4)
    (0.7, 0.2484)
    """
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), float(stdtrit(len(values) - 1, 0.975)) * spread
