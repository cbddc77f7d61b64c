"""One file a sampler: the rows of every batch, as `(batch_size,)` arrays of row numbers of the training set.

    sampler = create("samplers", "samples_per_class(n=2)", labels=labels, batch_size=112, seed=0)
    sampler.epoch = 3
    sampler.batch(step)     # (112,) int64, the same on every rank and after every restart
    len(sampler)            # batches an epoch: floor(N / batch_size), and one where the data set is smaller than a batch

A batch has `batch_size` rows, always; where the data set is too small for that, rows repeat, each as often as any other give or take
one. Every rank asks for the whole batch and keeps its `share`.

Label samplers (`needs_embeddings = False`) are random access: a batch depends on (seed, epoch, step) and on nothing else.

Embedded samplers (`needs_embeddings = True`) look at what the network makes of the training set. Their memory of it lies on the
training device:

    sampler.fill(embeddings (N, D))                      # once, before the first step
    rows = sampler.batch(step)
    sampler.refresh(rows (B,), embeddings (B, D))        # after each step, with the whole batch of all ranks; nothing waits

`batch` hands over a choice and launches the next one, which runs beside the step and is there when it is asked for: batch t + 1 is
chosen, from the memory as it then is, when batch t is asked for. `refresh` overwrites the rows of a batch. An engine may load ahead, by
asking for batches before the steps that they belong to; what counts is that it asks for them in order. Every rank fills and refreshes
with the same embeddings, and so chooses the same. Differs from the code of Roth et al. 2020, which chooses all batches of an epoch at its
start, from embeddings that are by then up to an epoch old.

What is chosen stays chosen: a batch is kept until its own `refresh`, and all that are kept are part of `state_dict()`. A run that stops
after any `refresh` and goes on from its state therefore trains on the batches of the unbroken run, however far ahead it loads.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from unimetric.errors import UnimetricError


def share(rows: Int[np.ndarray, "B"], rank: int, world: int) -> Int[np.ndarray, "B_rank"]:
    """The part of a batch that one of several ranks loads: consecutive rows, equally many on each.

    Consecutive, so that the samples of a class stay together, and so that what the ranks gather, one after another, is the batch in the
    order that a single rank would have seen: the same miner then draws the same tuples.

    >>> share(np.arange(6), rank=1, world=3)
    array([2, 3])

    Args:
        rows: the whole batch.
        rank: which one of the ranks.
        world: how many there are.
    """
    if len(rows) % world:
        raise UnimetricError(
            f"batch_size={len(rows)} cannot be shared evenly by {world} ranks", f"write `batch_size={(len(rows) // world or 1) * world}`"
        )
    size = len(rows) // world
    return rows[rank * size : (rank + 1) * size]


def occurrence(values: Int[np.ndarray, "K"]) -> Int[np.ndarray, "K"]:
    """How many times each value came before.

    >>> occurrence(np.array([7, 3, 7, 7, 3]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before
