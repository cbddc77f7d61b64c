"""Slice of a batch for one rank, and counts of repeated rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from unimetric.errors import UnimetricError


def rank_slice(rows: Int[np.ndarray, "B"], rank: int, world: int) -> Int[np.ndarray, " B_rank"]:
    """Return the slice of a batch that one of several ranks loads, equally long on each.

    Rows are consecutive, so that the samples of a class stay together. Gathered in rank order, they
    form the batch in the order of a single rank, and the same miner draws the same tuples.

    >>> rank_slice(np.arange(6), rank=1, world=3)
    array([2, 3])

    Args:
        rows: Rows of the whole batch.
        rank: Index of the rank.
        world: Number of ranks.
    """
    if len(rows) % world:
        raise UnimetricError(
            f"`batch_size` must be a multiple of the number of ranks ({world}), got batch_size={len(rows)}",
            f"use `batch_size={(len(rows) // world or 1) * world}`",
        )
    size = len(rows) // world
    return rows[rank * size : (rank + 1) * size]


def occurrence(values: Int[np.ndarray, "K"]) -> Int[np.ndarray, "K"]:
    """Count the earlier occurrences of each value.

    >>> occurrence(np.array([7, 3, 7, 7, 3]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before


share = rank_slice  # the old name
