"""Plain random batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int
from torch import Tensor

from unimetric.samplers._classes import balanced_groups, batches, group


class Shuffle:
    """Every row at most once an epoch, in random order.

    What proxy losses train on in Universal metric learning with parameter-efficient transfer learning (Kim et al. 2023, PUMA),
    appendix, "Batch construction".

    The rows that are left when no whole batch remains wait for the next epoch's order. A data set smaller than a batch repeats rows.

    Args:
        labels: (N,) the class of each training row; only their number matters.
        batch_size: rows of a batch.
        seed: numbers the sequence of batches.
    """

    needs_embeddings = False

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int = 0) -> None:
        self.rows, self.batch_size, self.seed, self.epoch = len(group(labels).rows), batch_size, seed, 0
        self.length = batches(self.rows, batch_size)
        self._plan, self._planned = np.empty((0, 0), np.int64), -1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Int[np.ndarray, "B"]]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        if self._planned != self.epoch:
            rng = np.random.default_rng((self.seed, self.epoch))
            # Dealt row by row: an epoch never needs a second deck, unless the data set is smaller than a batch.
            dealt = balanced_groups(self.rows, 1, self.length * self.batch_size, rng)
            self._plan, self._planned = dealt.reshape(self.length, self.batch_size), self.epoch
        return self._plan[step].copy()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass
