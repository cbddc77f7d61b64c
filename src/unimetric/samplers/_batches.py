"""A rank's slice of a batch, and repeated rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from unimetric.errors import UnimetricError


def rank_slice(rows: Int[np.ndarray, "B"], rank: int, world: int) -> Int[np.ndarray, "B_rank"]:
    """The part of a batch that one of several ranks loads: consecutive rows, equally many on each.

    Consecutive, so that the samples of a class stay together, and so that what the ranks gather, one after another, is the batch in the
    order that a single rank would have seen: the same miner then draws the same tuples.

    >>> rank_slice(np.arange(6), rank=1, world=3)
    array([2, 3])

    Args:
        rows: the whole batch.
        rank: which one of the ranks.
        world: how many there are.
    """
    if len(rows) % world:
        raise UnimetricError(
            f"batch_size={len(rows)} cannot be shared evenly by {world} ranks", f"write `batch_size={(len(rows) // world or 1) * world}`"
        )
    size = len(rows) // world
    return rows[rank * size : (rank + 1) * size]


def occurrence(values: Int[np.ndarray, "K"]) -> Int[np.ndarray, "K"]:
    """How many times each value came before.

    >>> occurrence(np.array([7, 3, 7, 7, 3]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before
