"""Batches of an epoch, as a training step takes them: rows, augmented views, labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.images.loading import View, to_device
from unimetric.samplers import occurrence, rank_slice
from unimetric.training.state import TrainingState

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Input of a training step.

    Args:
        rows: Positions of the whole batch in the training rows. Every rank has the same.
        labels: Classes of the whole batch, on the device.
        images: First augmented view of this rank's slice of the batch.
        views: Further augmented views of the same slice, if the objective requires them.
    """

    rows: Int[np.ndarray, "B"]
    labels: Int[Tensor, "B"]
    images: Float[Tensor, "B_rank 3 H W"]
    views: tuple[Tensor, ...] = ()


def batches(state: TrainingState, epoch: int, *, start: int = 0) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of an epoch, each with the index of its step.

    A streaming loader requests images ahead of the step. The sampler is called once per step, in order.

    Args:
        state: State of the run.
        epoch: Index of the epoch, which seeds the crops.
        start: Index of the first step.
    """
    pending: dict[int, np.ndarray] = {}  # rows that the loader has requested and no step has used

    def requests() -> Iterator[tuple[np.ndarray, View]]:
        for step in range(start, state.steps):
            pending[step] = state.sampler.batch(step)
            yield from request_views(state, epoch, pending[step])

    groups = in_groups(state.loader.load(requests()), state.views)
    for step, (images, *views) in enumerate(groups, start):
        rows = pending.pop(step)
        yield step, Batch(rows, to_device(state.labels[rows], state.fabric.device), images, tuple(views))


def request_views(state: TrainingState, epoch: int, rows: np.ndarray) -> Iterator[tuple[np.ndarray, View]]:
    """Yield the requests of this rank's slice of a batch, one per augmented view.

    Args:
        state: State of the run.
        epoch: Index of the epoch.
        rows: Positions of the whole batch in the training rows.
    """
    fabric = state.fabric
    # An image that occurs twice, in the split or in the batch, gets a different crop each time.
    repeats = state.copies[rows] + state.most_copies * occurrence(rows)
    mine = rank_slice(rows, fabric.global_rank, fabric.world_size)
    repeats = rank_slice(repeats, fabric.global_rank, fabric.world_size)
    for view in range(state.views):
        draw = View(state.recipe, seed=state.config.seed, epoch=epoch, view=view + state.views * repeats)
        yield state.split.train[mine], draw


def in_groups(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield consecutive groups of items.

    Raises:
        ValueError: The number of items is not a multiple of `size`.

    >>> list(in_groups("abcd", 2))
    [('a', 'b'), ('c', 'd')]
    """
    iterator = iter(items)
    while group := tuple(itertools.islice(iterator, size)):
        if len(group) < size:
            raise ValueError(f"expected groups of {size}, got {len(group)} leftover items")
        yield group
