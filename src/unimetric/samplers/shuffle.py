"""Plain random batches."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from unimetric.arguments import Count, Seed
from unimetric.kinds import Sampler
from unimetric.samplers._classes import balanced_groups, batches, group


class Shuffle(Sampler):
    """Plain random batches: every row at most once per epoch, in random order.

    Rows that do not fill a whole batch are not used in the epoch. A training set smaller than a
    batch repeats rows.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al. 2023), the
        batches of its proxy losses; appendix, "Batch construction".

    Args:
        labels: (N,) class of each training row. Only their number matters.
        batch_size: Number of rows of a batch.
        seed: Seed of the batches.
    """

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: Count, seed: Seed = 0) -> None:
        self.rows, self.batch_size, self.seed = len(group(labels).rows), batch_size, seed
        self.steps = batches(self.rows, batch_size)

    def plan(self) -> Int[np.ndarray, "steps B"]:
        rng = np.random.default_rng((self.seed, self.epoch))
        # Groups of one row never need a second permutation per epoch, unless the training set is smaller
        # than a batch.
        return balanced_groups(self.rows, 1, self.steps * self.batch_size, rng).reshape(self.steps, -1)
