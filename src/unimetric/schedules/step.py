"""Step decay of the learning rate."""

from __future__ import annotations

from unimetric.arguments import Count, Positive


def step(progress: float, epochs: int, *, every: Count = 20, gamma: Positive = 0.5) -> float:
    """Step decay, as in the code of PUMA (Kim et al. 2023).

        factor = gamma ^ floor(epoch / every)

    >>> step(40.5, 100)
    0.25

    Args:
        progress: Number of epochs done.
        epochs: Total number of epochs.
        every: Number of epochs between steps.
        gamma: Factor of each step.
    """
    return float(gamma ** (int(progress) // every))
