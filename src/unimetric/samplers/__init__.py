"""One file per sampler: the rows of every batch, numbered within the training set.

    sampler = create("samplers", "samples_per_class(n=2)", labels=labels, batch_size=112, seed=0)
    sampler.epoch = 3
    sampler.batch(step)     # (112,) int64, the same on every rank and after every restart
    len(sampler)            # batches per epoch: floor(N / batch_size), at least 1

A batch always has `batch_size` rows. If the dataset is smaller, rows repeat. Every rank computes the whole
batch and uses its `rank_slice`. The interface is `kinds.Sampler`.

Label samplers (`needs_embeddings = False`) have random access: a batch depends on (seed, epoch, step) only.

Embedded samplers (`needs_embeddings = True`) use embeddings of the training set, which they store on the
training device:

    sampler.fill(embeddings (N, D))                      # once, before the first step
    rows = sampler.batch(step)
    sampler.refresh(rows (B,), embeddings (B, D))        # after each step, with the whole batch of all ranks

`batch` returns a selection and starts the next one, which runs concurrently with the step: batch t + 1
is selected when batch t is requested, from the embeddings stored at that time. `refresh` overwrites the
rows of a batch. Batches may be requested ahead of their steps, but only in order. Every rank fills and
refreshes with the same embeddings, and therefore selects the same rows. The code of Roth et al. 2020
differs: it selects all batches of an epoch at its start, from embeddings that are up to one epoch old.

A batch is stored until its `refresh`, and all stored batches are part of `state_dict()`. A resumed run
therefore trains on the batches of the uninterrupted run, however far ahead it loads.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__, occurrence="unimetric.samplers._batches", rank_slice="unimetric.samplers._batches", share="unimetric.samplers._batches")
