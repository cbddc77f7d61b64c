"""GC: a batch spread over a big batch as widely as a greedy choice can."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.samplers._bank import Bank, Choice, to_device
from unimetric.samplers._batches import occurrence
from unimetric.samplers._classes import batches, group, hands_of, sample_within_classes


class GreedyCoreset:
    """GC of Roth et al., Revisiting training strategies and generalization performance in deep metric learning (ICML 2020), sec. 3.2.

        next centre = arg max over x of B* of  min over centres c of  |x - c|       (greedy k-centre; Agarwal et al. 2005)

    from a random first one, until there are b/n centres; then n - 1 other random samples of the class of each stand beside it, none of
    them in the batch already as long as the class has more. B* is a random part of the data set; the embeddings lie on the unit sphere.

    The authors' code looks its centres up in another random list than the one they were chosen from, so that its batches are random; here
    they are the centres.

    Args:
        labels: (N,) the class of each training row.
        batch_size: rows of a batch; a multiple of n.
        seed: numbers the sequence of draws.
        n: samples of each centre's class, the centre included.
        big_batch: rows of B*; all of the data set where it has fewer.
    """

    needs_embeddings = True

    def __init__(self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int = 0, n: int = 2, big_batch: int = 1024) -> None:
        self.classes, self.seed, self.n, self.centers = group(labels), seed, n, hands_of(batch_size, n)
        self.big_batch = min(big_batch, len(labels))
        if big_batch < self.centers:
            raise UnimetricError(f"big_batch={big_batch} has fewer rows than a batch has centres", f"write `big_batch={8 * batch_size}`")
        self.bank = Bank(self._choose, rows=len(labels), steps=batches(len(labels), batch_size))
        self.epoch = 0

    def _choose(self, embeddings: Float[Tensor, "N D"], epoch: int, step: int) -> Choice:
        rng = np.random.default_rng((self.seed, epoch, step))
        rows = rng.choice(len(embeddings), self.big_batch, replace=False)
        # A data set with fewer rows than centres gives them all, again and again.
        rows = np.resize(rows, max(len(rows), self.centers))
        centres = centers_by_table if embeddings.is_cuda else centers_by_product
        chosen = centres(embeddings[to_device(rows, embeddings.device)], self.centers)
        return chosen, lambda positions: self._with_mates(rows[positions], rng)

    def _with_mates(self, centres: Int[np.ndarray, "K"], rng: np.random.Generator) -> Int[np.ndarray, "B"]:
        """Each centre, followed by n - 1 random others of its class."""
        classes, others = self.classes, self.n - 1
        present, slot, count = np.unique(classes.number[centres], return_inverse=True, return_counts=True)
        # A walk of n steps for each centre passes n - 1 rows that are no centres, if the class has them.
        steps = count * self.n
        owner = np.arange(len(present)).repeat(steps)
        path = classes.rows[classes.start[present].repeat(steps) + sample_within_classes(classes.size[present], steps, rng)]
        mate = ~np.isin(path, centres)
        mate |= (np.bincount(owner, mate) == 0)[owner]  # a class that is all centres is its own company
        path, found = path[mate], np.bincount(owner[mate])
        place = (occurrence(slot)[:, None] * others + np.arange(others)) % found[slot][:, None]
        mates = path[(found.cumsum() - found)[slot][:, None] + place]
        return np.concatenate([centres[:, None], mates], 1).ravel()

    def __len__(self) -> int:
        return self.bank.steps

    def __iter__(self) -> Iterator[Int[np.ndarray, "B"]]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        return self.bank.batch(self.epoch, step)

    def fill(self, embeddings: Float[Tensor, "N D"]) -> None:
        self.bank.fill(embeddings)

    def refresh(self, rows: Int[Tensor, "B"], embeddings: Float[Tensor, "B D"]) -> None:
        self.bank.refresh(rows, embeddings)

    def state_dict(self) -> dict[str, Tensor]:
        return self.bank.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.bank.load_state_dict(state)


def centers_by_table(points: Float[Tensor, "S D"], count: int) -> Int[Tensor, "count"]:
    """Greedy k-centre among unit vectors, from the first one on; for GPUs: one product, and three small kernels a centre."""
    points = points.double()  # out of reach of TF32, and free at this size
    closeness = (points @ points.T).fill_diagonal_(4)  # to itself more than to any other: no point is chosen twice
    chosen = [torch.zeros(1, dtype=torch.int64, device=points.device)]
    nearest = closeness[:1]
    for _ in range(count - 1):
        chosen.append(nearest.argmin(1))
        nearest = torch.maximum(nearest, closeness.index_select(0, chosen[-1]))
    return torch.cat(chosen)


def centers_by_product(points: Float[Tensor, "S D"], count: int) -> Int[Tensor, "count"]:
    """The same for CPUs: products with the centres only, and in numpy, which starts an operation sooner than torch."""
    table = points.numpy()
    nearest = np.full(len(table), -4, table.dtype)
    chosen = np.zeros(count, np.int64)
    for number in range(count):
        at = chosen[number] = nearest.argmin() if number else 0
        np.maximum(nearest, table @ table[at], out=nearest)
        nearest[at] = 4
    return torch.from_numpy(chosen)
