"""SPC-n: equally many samples of each class in a batch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from unimetric.arguments import Count, Seed
from unimetric.kinds import Sampler
from unimetric.samplers._batches import occurrence
from unimetric.samplers._classes import balanced_groups, batches, group, groups_per_batch


class SamplesPerClass(Sampler):
    """SPC-n: equally many samples of each class in a batch.

        a batch is  b/n  different classes, drawn at random,
        and  n  samples of each, drawn at random

    The n samples of a class are adjacent. Over an epoch, all classes come equally often, up to one,
    and so do the rows within a class. A class of fewer than n rows repeats them. With fewer than
    b/n classes, each comes several times in a batch, with other samples as long as it has them.

    Differs from the authors' code:
        That code draws both classes and samples with replacement, so that a batch may hold a class,
        and even an image, twice. `with_replacement=True` does the same.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), sec. 3.2.

    Args:
        labels: (N,) class of each training row.
        batch_size: Number of rows of a batch, a multiple of n.
        seed: Seed of the batches.
        n: Number of samples per class.
        with_replacement: Whether to draw with replacement, as in the authors' code.
    """

    def __init__(
        self, *, labels: Int[np.ndarray, "N"], batch_size: Count, seed: Seed = 0, n: Count = 2, with_replacement: bool = False
    ) -> None:
        self.classes, self.n, self.seed = group(labels), n, seed
        self.groups, self.steps, self.with_replacement = groups_per_batch(batch_size, n), batches(len(labels), batch_size), with_replacement

    def plan(self) -> Int[np.ndarray, "steps B"]:
        rng = np.random.default_rng((self.seed, self.epoch))
        classes, count = self.classes, len(self.classes)
        if self.with_replacement:
            chosen = rng.integers(count, size=self.steps * self.groups).repeat(self.n)
            return classes.rows[classes.start[chosen] + rng.integers(classes.size[chosen])].reshape(self.steps, -1)
        # Every batch has all classes as often as they fit, and a group of distinct ones for the rest.
        whole = np.tile(np.arange(count), (self.steps, self.groups // count))
        chosen = np.concatenate([whole, balanced_groups(count, self.groups % count, self.steps, rng)], axis=1)
        chosen = rng.permuted(chosen, axis=1).ravel()
        # The k-th visit of a class takes the k-th n of its shuffled rows, cyclically. No row repeats
        # before all have been used.
        sample = (occurrence(chosen)[:, None] * self.n + np.arange(self.n)) % classes.size[chosen][:, None]
        return classes.shuffled(rng)[classes.start[chosen][:, None] + sample].reshape(self.steps, -1)
