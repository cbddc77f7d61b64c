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

from unimetric.samplers._batches import occurrence, rank_slice

__all__ = ["occurrence", "rank_slice"]

share = rank_slice  # the old name
