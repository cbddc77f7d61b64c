"""Constant learning rate."""

from __future__ import annotations


def constant(progress: float, epochs: int) -> float:
    """Constant factor of 1, as in Roth et al. 2020."""
    return 1.0
