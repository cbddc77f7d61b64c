"""SPC-R: random samples, and one more so that the batch has a positive pair."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int
from torch import Tensor

from unimetric.samplers._classes import balanced_groups, batches, group


class ClassRandom:
    """SPC-R of Roth et al., Revisiting training strategies and generalization performance in deep metric learning (ICML 2020), sec. 3.2.

        a batch is  b - 1  random samples of the data set, and one that has the class of one of them

    so that the number of classes varies from batch to batch. The first b - 1 come without repeats within an epoch. The last one is not in
    the batch yet, unless no class of the batch has another row; it stands last.

    The authors' code draws a class first and then one of its samples, which favours samples of small classes; here, as in the paper, all
    samples are equally likely.

    Args:
        labels: (N,) the class of each training row.
        batch_size: rows of a batch, at least 2.
        seed: numbers the sequence of batches.
    """

    needs_embeddings = False

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int = 0) -> None:
        self.classes, self.batch_size, self.seed, self.epoch = group(labels), batch_size, seed, 0
        self.length = batches(len(labels), batch_size, least=2)
        self._plan, self._planned = np.empty((0, 0), np.int64), -1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Int[np.ndarray, "B"]]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        if self._planned != self.epoch:
            rng = np.random.default_rng((self.seed, self.epoch))
            dealt = balanced_groups(len(self.classes.rows), 1, self.length * (self.batch_size - 1), rng)
            self._plan, self._planned = dealt.reshape(self.length, self.batch_size - 1), self.epoch
        rows = self._plan[step]
        return np.append(rows, self._mate(rows, np.random.default_rng((self.seed, self.epoch, step + 1))))

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def _mate(self, rows: Int[np.ndarray, "rows"], rng: np.random.Generator) -> int:
        """A row of the class of one of these rows, and none of them where that can be."""
        number = self.classes.number[rows]
        held = np.bincount(self.classes.number[np.unique(rows)], minlength=len(self.classes))
        more = number[self.classes.size[number] > held[number]]
        mates = self.classes.of(int(rng.choice(more if len(more) else number)))
        fresh = np.setdiff1d(mates, rows)
        return int(rng.choice(fresh if len(fresh) else mates))
