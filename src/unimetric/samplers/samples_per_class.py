"""SPC-n: equally many samples of each class in a batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int
from torch import Tensor

from unimetric.samplers._batches import occurrence
from unimetric.samplers._classes import balanced_groups, batches, group, hands_of


class SamplesPerClass:
    """SPC-n of Roth et al., Revisiting training strategies and generalization performance in deep metric learning (ICML 2020), sec. 3.2.

        a batch is  b/n  different classes, drawn at random, and  n  samples of each, drawn at random

    The n samples of a class stand side by side. Over an epoch all classes come equally often, give or take one, and within a class all rows
    do. A class of fewer than n rows repeats them. With fewer than b/n classes, each comes several times in a batch, with other samples
    as long as it has them.

    The authors' code draws both classes and samples with replacement, so that a batch may hold a class, and even a picture, twice;
    `with_replacement=True` does as it does.

    Args:
        labels: (N,) the class of each training row.
        batch_size: rows of a batch; a multiple of n.
        seed: numbers the sequence of batches.
        n: samples of each class.
        with_replacement: draw as the authors' code does.
    """

    needs_embeddings = False

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int = 0, n: int = 2, with_replacement: bool = False) -> None:
        self.classes, self.n, self.seed, self.epoch = group(labels), n, seed, 0
        self.hands, self.length, self.with_replacement = hands_of(batch_size, n), batches(len(labels), batch_size), with_replacement
        self._plan, self._planned = np.empty((0, 0), np.int64), -1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Int[np.ndarray, "B"]]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        if self._planned != self.epoch:
            self._plan, self._planned = self._epoch_plan(), self.epoch
        return self._plan[step].copy()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def _epoch_plan(self) -> Int[np.ndarray, "steps B"]:
        rng = np.random.default_rng((self.seed, self.epoch))
        classes, count = self.classes, len(self.classes)
        if self.with_replacement:
            chosen = rng.integers(count, size=self.length * self.hands).repeat(self.n)
            return classes.rows[classes.start[chosen] + rng.integers(classes.size[chosen])].reshape(self.length, -1)
        # All classes in every batch as often as they fit, and a hand of different ones for what is left.
        whole = np.tile(np.arange(count), (self.length, self.hands // count))
        chosen = np.concatenate([whole, balanced_groups(count, self.hands % count, self.length, rng)], axis=1)
        chosen = rng.permuted(chosen, axis=1).ravel()
        # The k-th visit of a class takes the k-th n of its shuffled rows, round and round: nothing repeats before everything came.
        sample = (occurrence(chosen)[:, None] * self.n + np.arange(self.n)) % classes.size[chosen][:, None]
        return classes.shuffled(rng)[classes.start[chosen][:, None] + sample].reshape(self.length, -1)
