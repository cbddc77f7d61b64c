"""The learning rate in steps."""

from __future__ import annotations

from unimetric.errors import UnimetricError


def step(progress: float, epochs: int, *, every: int = 20, gamma: float = 0.5) -> float:
    """Step decay, as in the code of PUMA (Kim et al. 2023).

        factor = gamma ^ floor(epoch / every)

    Args:
        progress: epochs gone by.
        epochs: epochs in all.
        every: epochs between steps.
        gamma: factor of each step.

    >>> step(40.5, 100)
    0.25
    """
    if every < 1:
        raise UnimetricError(f"`schedule = step(every={every})`", "write how many epochs lie between steps, 1 at least")
    return float(gamma ** (int(progress) // every))
