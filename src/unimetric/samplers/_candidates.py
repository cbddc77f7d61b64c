"""The draw of the matching samplers: a big batch, and candidate batches made of its rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from unimetric.errors import UnimetricError
from unimetric.samplers._classes import group, hands_of, sample_within_classes


class Candidates:
    """Draws B*, a big batch of n samples a class, and m candidates: batches of n samples a class from B*. By numpy alone, in O(b*).

    Where classes are as many, and as large, as it takes, a candidate's classes are different, and no row is in B* twice. Where they are
    not, each comes equally often, give or take one.

    Args:
        labels: (N,) the class of each training row.
        batch_size: rows of a candidate.
        seed: numbers the sequence of draws.
        n: samples of each class.
        big_batch: rows of B*; no more are drawn than the data set has.
        candidates: how many.
    """

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int, n: int, big_batch: int, candidates: int) -> None:
        if candidates < 1:
            raise UnimetricError(f"candidates={candidates} leaves nothing to choose from", "write `candidates=10`")
        if big_batch < batch_size:
            raise UnimetricError(f"big_batch={big_batch} is smaller than batch_size={batch_size}", f"write `big_batch={8 * batch_size}`")
        self.classes, self.n, self.seed, self.candidates = group(labels), n, seed, candidates
        self.hands = hands_of(batch_size, n)
        self.big_hands = max(self.hands, min(big_batch, len(labels)) // n)
        self._order, self._ordered = self.classes.rows, -1

    def draw(self, epoch: int, step: int) -> tuple[Int[np.ndarray, "S"], Int[np.ndarray, "m B"]]:
        """The rows of B*, and of each candidate the positions in B*. The same for the same (seed, epoch, step)."""
        if self._ordered != epoch:
            self._order, self._ordered = self.classes.shuffled(np.random.default_rng((self.seed, epoch))), epoch
        rng = np.random.default_rng((self.seed, epoch, step + 1))  # (seed, epoch, 0) would be (seed, epoch)
        n, count = self.n, len(self.classes)
        # Which classes B* has, and how many samples of each.
        whole, left = divmod(self.big_hands, count)
        extra = rng.choice(count, left, replace=False)
        chosen = np.arange(count) if whole else extra
        visits = np.full(len(chosen), whole or 1)
        if whole:
            visits[extra] += 1
        samples = visits * n
        start = samples.cumsum() - samples
        # A walk meets no row of a class twice before it has met all; the epoch's order makes every pair of them possible.
        places = sample_within_classes(self.classes.size[chosen], samples, rng)
        rows = self._order[self.classes.start[chosen].repeat(samples) + places]
        # Of each candidate the classes, and of each class neighbours in B*, from a random place on.
        whole, left = divmod(self.hands, len(chosen))
        picked = np.tile(np.arange(len(chosen)), (self.candidates, whole))
        if left:
            some = rng.random((self.candidates, len(chosen))).argsort(1)[:, :left]
            picked = np.concatenate([picked, some], 1)
        visit = np.arange(self.hands) // len(chosen)
        most = (whole + (left > 0)) * n
        place = rng.integers(np.maximum(samples - most, 0) + 1, size=(self.candidates, len(chosen)))
        place = np.take_along_axis(place, picked, 1)[:, :, None] + visit[:, None] * n + np.arange(n)
        positions = start[picked][:, :, None] + place % samples[picked][:, :, None]
        return rows, positions.reshape(self.candidates, -1)
