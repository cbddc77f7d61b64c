"""Confidence interval of a fraction."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(mean: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's confidence interval of the mean of independent values from 0 to 1.

    It is exact for values of 0 or 1, and cautious for others, because they vary less.

    >>> [round(bound, 3) for bound in wilson(1.0, 500)]
    [0.992, 1.0]

    Reference:
        Probable inference, the law of succession, and statistical inference (Wilson, JASA 1927).

    Args:
        mean: Mean of the values.
        count: Number of values.
        level: Confidence level.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    ratio = z * z / count
    middle, half = mean + ratio / 2, math.sqrt(ratio * (mean * (1 - mean) + ratio / 4))
    return max(0.0, (middle - half) / (1 + ratio)), min(1.0, (middle + half) / (1 + ratio))
