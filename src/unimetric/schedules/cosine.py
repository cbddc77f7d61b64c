"""The learning rate along half a cosine."""

from __future__ import annotations

import math


def cosine(progress: float, epochs: int, *, floor: float = 0.0, warmup: float = 0.0) -> float:
    """SGDR: stochastic gradient descent with warm restarts (Loshchilov & Hutter, ICLR 2017), without restarts.

        factor = floor + (1 - floor) (1 + cos(pi t)) / 2,   t the share of the epochs after the warm-up

    Args:
        progress: epochs gone by.
        epochs: epochs in all.
        floor: factor at the end.
        warmup: epochs over which the factor first rises from zero.

    >>> cosine(5, 10), cosine(1, 10, warmup=2)
    (0.5, 0.5)
    """
    if progress < warmup:
        return progress / warmup
    share = min(1.0, (progress - warmup) / max(1e-9, epochs - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2
