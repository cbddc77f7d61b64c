"""Draws shared by samplers: rows by class, balanced groups, strides within a class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from unimetric.errors import UnimetricError


@dataclass(frozen=True)
class Classes:
    """Rows of each class.

    Labels may be any integers; classes are numbered 0..C-1 in their order.

    Args:
        rows: (N,) row numbers, sorted by class.
        start: (C,) start of each class in `rows`.
        size: (C,) number of rows of each class.
        number: (N,) class of each row.
    """

    rows: Int[np.ndarray, "N"]
    start: Int[np.ndarray, "C"]
    size: Int[np.ndarray, "C"]
    number: Int[np.ndarray, "N"]

    def __len__(self) -> int:
        return len(self.size)

    def of(self, number: int) -> Int[np.ndarray, " rows"]:
        """Return the rows of one class."""
        return self.rows[self.start[number] : self.start[number] + self.size[number]]

    def shuffled(self, rng: np.random.Generator) -> Int[np.ndarray, "N"]:
        """Return `rows` with the rows of each class in a new random order."""
        return self.rows[np.lexsort((rng.random(len(self.rows)), self.number[self.rows]))]


def group(labels: Int[np.ndarray, "N"]) -> Classes:
    """Group rows by class."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0:
        raise UnimetricError(f"a sampler needs one label per training row, got shape {labels.shape}", "check that the split is not empty")
    _, number, size = np.unique(labels, return_inverse=True, return_counts=True)
    return Classes(np.argsort(number, kind="stable"), np.cumsum(size) - size, size, number)


def batches(rows: int, batch_size: int) -> int:
    """Return the number of batches per epoch: floor(N / batch_size), at least one."""
    return max(1, rows // batch_size)


def groups_per_batch(batch_size: int, n: int) -> int:
    """Return how many groups of n samples make a batch."""
    if batch_size % n:
        near = max(1, round(batch_size / n)) * n
        raise UnimetricError(
            f"`batch_size` must be a multiple of n={n} samples per class, got batch_size={batch_size}",
            f"use `batch_size={near}`, or another `n`",
        )
    return batch_size // n


def balanced_groups(items: int, size: int, groups: int, rng: np.random.Generator) -> Int[np.ndarray, "groups size"]:
    """Draw groups of distinct items from a permutation; permute again when it is used up.

    Every item is drawn equally often, up to one, and each group by itself is a random set.
    """
    drawn = np.empty(groups * size, np.int64)
    at = 0
    while at < len(drawn):
        order = rng.permutation(items)
        unfinished = at % size
        if unfinished:
            # The last permutation ended inside a group. Complete it with items that it does not hold.
            held = np.isin(order, drawn[at - unfinished : at])
            first = np.flatnonzero(~held)[: size - unfinished]
            order = np.concatenate([order[first], np.delete(order, first)])
        taken = order[: len(drawn) - at]
        drawn[at : at + len(taken)] = taken
        at += len(taken)
    return drawn.reshape(groups, size)


def sample_within_classes(size: Int[np.ndarray, "C"], steps: Int[np.ndarray, "C"], rng: np.random.Generator) -> Int[np.ndarray, " indices"]:
    """Draw indices within each class, without repeats until a class is used up.

    Indices are ordered class by class. Starts at a random index and advances by a constant stride that has no
    common divisor with the size. Takes O(indices), however large the classes are.
    """
    stride = np.ones_like(size)
    for _ in range(6):  # most strides are valid; if none of six is, the stride is 1
        other = rng.integers(1, np.maximum(size, 2))
        stride = np.where((stride == 1) & (np.gcd(other, size) == 1), other, stride)
    number = np.arange(steps.sum()) - (steps.cumsum() - steps).repeat(steps)
    return (rng.integers(size).repeat(steps) + number * stride.repeat(steps)) % size.repeat(steps)
