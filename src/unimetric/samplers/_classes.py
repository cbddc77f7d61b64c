"""Training rows grouped by class, cards dealt from reshuffled decks, walks round a class: what the samplers draw with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from unimetric.errors import UnimetricError


@dataclass(frozen=True)
class Classes:
    """Which rows belong to which class. Labels may be any integers; here classes are numbered 0..C-1 in their order.

    Args:
        rows: (N,) row numbers, one class after another.
        start: (C,) where a class begins in `rows`.
        size: (C,) how many rows it has.
        number: (N,) the class of each row.
    """

    rows: Int[np.ndarray, "N"]
    start: Int[np.ndarray, "C"]
    size: Int[np.ndarray, "C"]
    number: Int[np.ndarray, "N"]

    def __len__(self) -> int:
        return len(self.size)

    def of(self, number: int) -> Int[np.ndarray, "rows"]:
        """The rows of one class."""
        return self.rows[self.start[number] : self.start[number] + self.size[number]]

    def shuffled(self, rng: np.random.Generator) -> Int[np.ndarray, "N"]:
        """`rows` with the rows of each class in a new order."""
        return self.rows[np.lexsort((rng.random(len(self.rows)), self.number[self.rows]))]


def group(labels: Int[np.ndarray, "N"]) -> Classes:
    """Sort rows into classes."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0:
        raise UnimetricError(f"a sampler needs a label for each training row, not labels of shape {labels.shape}", "is the split empty?")
    _, number, size = np.unique(labels, return_inverse=True, return_counts=True)
    return Classes(np.argsort(number, kind="stable"), np.cumsum(size) - size, size, number)


def batches(rows: int, batch_size: int, *, least: int = 1) -> int:
    """Batches an epoch: floor(N / batch_size), at least one."""
    if batch_size < least:
        raise UnimetricError(f"batch_size={batch_size} is smaller than {least}", "write `batch_size=112`")
    return max(1, rows // batch_size)


def hands_of(batch_size: int, n: int) -> int:
    """How many times n samples make a batch."""
    if n < 1 or batch_size % n:
        near = max(1, round(batch_size / max(n, 1))) * max(n, 1)
        raise UnimetricError(
            f"batch_size={batch_size} is not a multiple of n={n} samples per class", f"write `batch_size={near}`, or another `n`"
        )
    return batch_size // n


def balanced_groups(cards: int, hand: int, hands: int, rng: np.random.Generator) -> Int[np.ndarray, "hands hand"]:
    """Deal hands from a deck of numbered cards that is shuffled anew whenever it is used up. No hand holds a card twice.

    So every card is dealt as often as any other, give or take one, and each hand by itself is a random set.
    """
    dealt = np.empty(hands * hand, np.int64)
    at = 0
    while at < len(dealt):
        deck = rng.permutation(cards)
        unfinished = at % hand
        if unfinished:
            # The last deck ended inside a hand: first come cards that this hand does not hold.
            held = np.isin(deck, dealt[at - unfinished : at])
            first = np.flatnonzero(~held)[: hand - unfinished]
            deck = np.concatenate([deck[first], np.delete(deck, first)])
        taken = deck[: len(dealt) - at]
        dealt[at : at + len(taken)] = taken
        at += len(taken)
    return dealt.reshape(hands, hand)


def sample_within_classes(size: Int[np.ndarray, "C"], steps: Int[np.ndarray, "C"], rng: np.random.Generator) -> Int[np.ndarray, "places"]:
    """Some places in each class, one class after another: without repeats, until a class has no more.

    From a random place on, always as far, by a number that shares no divisor with the size. O(places), however large the classes are.
    """
    stride = np.ones_like(size)
    for _ in range(6):  # most numbers will do; where none of six does, neighbours it is
        other = rng.integers(1, np.maximum(size, 2))
        stride = np.where((stride == 1) & (np.gcd(other, size) == 1), other, stride)
    number = np.arange(steps.sum()) - (steps.cumsum() - steps).repeat(steps)
    return (rng.integers(size).repeat(steps) + number * stride.repeat(steps)) % size.repeat(steps)
