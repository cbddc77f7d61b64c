"""Cosine decay of the learning rate."""

from __future__ import annotations

import math

from unimetric.arguments import Fraction, NonNegative


def cosine(progress: float, epochs: int, *, floor: Fraction = 0.0, warmup: NonNegative = 0.0) -> float:
    """Cosine decay without restarts, after an optional warm-up.

        factor = floor + (1 - floor) (1 + cos(pi t)) / 2
        t the fraction of the epochs after the warm-up

    >>> cosine(5, 10), cosine(1, 10, warmup=2)
    (0.5, 0.5)

    Reference:
        SGDR: stochastic gradient descent with warm restarts (Loshchilov & Hutter, ICLR 2017).

    Args:
        progress: Number of epochs done.
        epochs: Total number of epochs.
        floor: Factor at the end.
        warmup: Number of epochs over which the factor first rises from zero.
    """
    if progress < warmup:
        return progress / warmup
    fraction = min(1.0, (progress - warmup) / max(1e-9, epochs - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * fraction)) / 2
