"""Which splits of a long sequence to work with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from unimetric.errors import UnimetricError


def nearest(distances: Sequence[float], targets: Sequence[float]) -> list[int]:
    """A split for each wanted distance, no split twice, with the least deviation in sum (Milbich et al. 2021, whose targets are table 1's).

    A larger target gets a split of larger distance: of the choices that deviate as little, one that is in order.

    Args:
        distances: of the splits there are.
        targets: the distances wanted.

    >>> nearest([1.0, 2.0, 5.0, 9.0], [2.1, 6.0])
    [1, 2]
    """
    if not 0 < len(targets) <= len(distances):
        raise UnimetricError(f"{len(targets)} splits cannot be chosen from {len(distances)}", "ask for fewer, or make a longer sequence")
    cost = np.abs(np.asarray(targets, float)[:, None] - np.asarray(distances, float)[None, :])
    chosen = sorted((int(column) for column in linear_sum_assignment(cost)[1]), key=distances.__getitem__)
    return [chosen[rank] for rank in np.argsort(np.argsort(targets, kind="stable"))]


def evenly(distances: Sequence[float], count: int) -> list[int]:
    """Splits that cover the range of distances evenly, from the easiest to the hardest.

    Args:
        distances: of the splits there are.
        count: how many to choose.

    >>> evenly([1.0, 2.0, 2.1, 5.0, 9.0], 3)
    [0, 3, 4]
    """
    return nearest(distances, list(np.linspace(min(distances), max(distances), count)) if count > 0 else [])
