"""SPC-R: random samples, and one more so that the batch has a positive pair."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from jaxtyping import Int

from unimetric.arguments import Range, Seed
from unimetric.kinds import Sampler
from unimetric.samplers._classes import balanced_groups, batches, group


class ClassRandom(Sampler):
    """SPC-R: random samples, and one more so that the batch has a positive pair.

        a batch is  b - 1  random samples of the training set,
        and one that has the class of one of them

    The number of classes therefore varies between batches. The first b - 1 samples do not repeat
    within an epoch. The last sample of the batch is a new one, unless no class of the batch has
    another row.

    Differs from the authors' code:
        That code draws a class first and then one of its samples, which favors samples of small
        classes. Here, as in the paper, all samples are equally likely.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), sec. 3.2.

    Args:
        labels: (N,) class of each training row.
        batch_size: Number of rows of a batch, at least 2.
        seed: Seed of the batches.
    """

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: Annotated[int, Range(2)], seed: Seed = 0) -> None:
        self.classes, self.batch_size, self.seed = group(labels), batch_size, seed
        self.steps = batches(len(labels), batch_size)

    def plan(self) -> Int[np.ndarray, "steps others"]:
        rng = np.random.default_rng((self.seed, self.epoch))
        return balanced_groups(len(self.classes.rows), 1, self.steps * (self.batch_size - 1), rng).reshape(self.steps, -1)

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        rows = super().batch(step)
        return np.append(rows, self._mate(rows, np.random.default_rng((self.seed, self.epoch, step + 1))))

    def _mate(self, rows: Int[np.ndarray, " rows"], rng: np.random.Generator) -> int:
        """Return a row of the class of one of these rows, and not one of them if possible."""
        number = self.classes.number[rows]
        held = np.bincount(self.classes.number[np.unique(rows)], minlength=len(self.classes))
        more = number[self.classes.size[number] > held[number]]
        mates = self.classes.of(int(rng.choice(more if len(more) else number)))
        fresh = np.setdiff1d(mates, rows)
        return int(rng.choice(fresh if len(fresh) else mates))
