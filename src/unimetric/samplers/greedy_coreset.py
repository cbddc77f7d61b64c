"""GC: a batch spread as widely over a big batch as a greedy selection can."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Seed
from unimetric.errors import UnimetricError
from unimetric.images.loading import to_device
from unimetric.kinds import EmbeddedSampler
from unimetric.samplers._bank import Bank, Choice
from unimetric.samplers._batches import occurrence
from unimetric.samplers._classes import batches, group, groups_per_batch, sample_within_classes


class GreedyCoreset(EmbeddedSampler):
    """GC: a batch spread as widely over a big batch as a greedy selection can.

        next center = arg max over x of B* of  min over centers c of  |x - c|
        (greedy k-center; Agarwal et al. 2005)

    The first center is random, and there are b/n centers. Each is followed by n - 1 other random
    samples of its class, without repeats in the batch as long as the class has more rows. B* is a
    random subset of the training set. The embeddings are unit vectors.

    Differs from the authors' code:
        That code reads its centers from another random list than the one they were selected from,
        so that its batches are random. Here they are the centers.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), sec. 3.2.

    Args:
        labels: (N,) class of each training row.
        batch_size: Number of rows of a batch, a multiple of n.
        seed: Seed of the draws.
        n: Number of samples per center, including the center.
        big_batch: Number of rows of B*. A smaller training set is used completely.
    """

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: Count, seed: Seed = 0, n: Count = 2, big_batch: Count = 1024) -> None:
        self.classes, self.seed, self.n, self.centers = group(labels), seed, n, groups_per_batch(batch_size, n)
        self.big_batch = min(big_batch, len(labels))
        if big_batch < self.centers:
            raise UnimetricError(
                f"`big_batch` must be at least the number of centers ({self.centers}), got big_batch={big_batch}",
                f"use `big_batch={8 * batch_size}`",
            )
        self.bank = Bank(self._choose, rows=len(labels), steps=batches(len(labels), batch_size))

    def _choose(self, embeddings: Float[Tensor, "N D"], epoch: int, step: int) -> Choice:
        rng = np.random.default_rng((self.seed, epoch, step))
        rows = rng.choice(len(embeddings), self.big_batch, replace=False)
        # A training set with fewer rows than centers repeats all of them.
        rows = np.resize(rows, max(len(rows), self.centers))
        select_centers = centers_by_table if embeddings.is_cuda else centers_by_product
        chosen = select_centers(embeddings[to_device(rows, embeddings.device)], self.centers)
        return chosen, partial(self._add_class_mates, rows, rng)

    def _add_class_mates(self, rows: Int[np.ndarray, "S"], rng: np.random.Generator, chosen: Int[np.ndarray, "K"]) -> Int[np.ndarray, "B"]:
        """Return each chosen row, a center, followed by n - 1 random others of its class."""
        centers, classes, others = rows[chosen], self.classes, self.n - 1
        present, slot, count = np.unique(classes.number[centers], return_inverse=True, return_counts=True)
        # A stride of n steps per center visits n - 1 rows that are not centers, if the class has them.
        steps = count * self.n
        owner = np.arange(len(present)).repeat(steps)
        path = classes.rows[classes.start[present].repeat(steps) + sample_within_classes(classes.size[present], steps, rng)]
        mate = ~np.isin(path, centers)
        mate |= (np.bincount(owner, mate) == 0)[owner]  # if all rows of a class are centers, they are also its mates
        path, found = path[mate], np.bincount(owner[mate])
        index = (occurrence(slot)[:, None] * others + np.arange(others)) % found[slot][:, None]
        mates = path[(found.cumsum() - found)[slot][:, None] + index]
        return np.concatenate([centers[:, None], mates], 1).ravel()


def centers_by_table(points: Float[Tensor, "S D"], count: int) -> Int[Tensor, " count"]:
    """Select greedy k-centers among unit vectors, starting with the first one, on a GPU.

    Takes one product, and three small kernels per center.
    """
    points = points.double()  # TF32 does not apply to float64, which costs nothing at this size
    closeness = (points @ points.T).fill_diagonal_(4)  # above any similarity, so that no point is selected twice
    chosen = [torch.zeros(1, dtype=torch.int64, device=points.device)]
    nearest = closeness[:1]
    for _ in range(count - 1):
        chosen.append(nearest.argmin(1))
        nearest = torch.maximum(nearest, closeness.index_select(0, chosen[-1]))
    return torch.cat(chosen)


def centers_by_product(points: Float[Tensor, "S D"], count: int) -> Int[Tensor, " count"]:
    """Select the same centers on a CPU, from products with the centers only.

    Uses numpy, whose operations have less overhead than those of torch.
    """
    table = points.numpy()
    nearest = np.full(len(table), -4, table.dtype)
    chosen = np.zeros(count, np.int64)
    for number in range(count):
        at = chosen[number] = nearest.argmin() if number else 0
        np.maximum(nearest, table @ table[at], out=nearest)
        nearest[at] = 4
    return torch.from_numpy(chosen)
