"""Draws of the matching samplers: a big batch, and candidate batches made of its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.images.loading import to_device
from unimetric.samplers._bank import Choice
from unimetric.samplers._classes import group, groups_per_batch, sample_within_classes


class Candidates:
    """Draws a big batch B* and m candidate batches from B*, all with n samples per class.

    Draws use only numpy, in O(b*). If there are enough sufficiently large classes, the classes of a
    candidate are distinct, and no row is in B* twice. Otherwise, each comes equally often, up to
    one.

    Args:
        labels: (N,) class of each training row.
        batch_size: Number of rows of a candidate.
        seed: Seed of the draws.
        n: Number of samples per class.
        big_batch: Number of rows of B*, at most the size of the training set.
        candidates: Number of candidates m.
    """

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int, n: int, big_batch: int, candidates: int) -> None:
        if big_batch < batch_size:
            raise UnimetricError(
                f"`big_batch` must be at least batch_size={batch_size}, got big_batch={big_batch}", f"use `big_batch={8 * batch_size}`"
            )
        self.classes, self.n, self.seed, self.candidates = group(labels), n, seed, candidates
        self.groups = groups_per_batch(batch_size, n)
        self.big_groups = max(self.groups, min(big_batch, len(labels)) // n)
        self._order, self._ordered = self.classes.rows, -1

    def choose(self, cost: Callable[[Tensor, Tensor], Tensor], embeddings: Float[Tensor, "N D"], epoch: int, step: int) -> Choice:
        """Draw, and choose the candidate of the lowest cost.

        Args:
            cost: Function of the embeddings of B* and of the positions of the candidates.
            embeddings: Embeddings of all training rows.
            epoch: Index of the epoch.
            step: Index of the step.
        """
        rows, positions = self.draw(epoch, step)
        big_batch = embeddings.index_select(0, to_device(rows, embeddings.device))
        return cost(big_batch, to_device(positions, embeddings.device)).argmin(), rows[positions].__getitem__

    def draw(self, epoch: int, step: int) -> tuple[Int[np.ndarray, "S"], Int[np.ndarray, "m B"]]:
        """Return the rows of B*, and the positions of each candidate in B*.

        Deterministic for (seed, epoch, step).
        """
        if self._ordered != epoch:
            self._order, self._ordered = self.classes.shuffled(np.random.default_rng((self.seed, epoch))), epoch
        rng = np.random.default_rng((self.seed, epoch, step + 1))  # (seed, epoch, 0) would be (seed, epoch)
        n, count = self.n, len(self.classes)
        # Classes of B*, and the number of samples of each.
        whole, left = divmod(self.big_groups, count)
        extra = rng.choice(count, left, replace=False)
        chosen = np.arange(count) if whole else extra
        visits = np.full(len(chosen), whole or 1)
        if whole:
            visits[extra] += 1
        samples = visits * n
        start = samples.cumsum() - samples
        # A stride visits every row of a class before it repeats one. The order of the epoch makes every
        # pair of rows possible.
        indices = sample_within_classes(self.classes.size[chosen], samples, rng)
        rows = self._order[self.classes.start[chosen].repeat(samples) + indices]
        # Classes of each candidate, and for each class consecutive positions in B* from a random start.
        whole, left = divmod(self.groups, len(chosen))
        picked = np.tile(np.arange(len(chosen)), (self.candidates, whole))
        if left:
            some = rng.random((self.candidates, len(chosen))).argsort(1)[:, :left]
            picked = np.concatenate([picked, some], 1)
        visit = np.arange(self.groups) // len(chosen)
        most = (whole + (left > 0)) * n
        first = rng.integers(np.maximum(samples - most, 0) + 1, size=(self.candidates, len(chosen)))
        index = np.take_along_axis(first, picked, 1)[:, :, None] + visit[:, None] * n + np.arange(n)
        positions = start[picked][:, :, None] + index % samples[picked][:, :, None]
        return rows, positions.reshape(self.candidates, -1)
