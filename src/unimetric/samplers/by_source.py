"""Batches by dataset, category or domain, with a weight for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from unimetric.arguments import Count, Fraction, Seed
from unimetric.errors import UnimetricError
from unimetric.kinds import Sampler
from unimetric.samplers._classes import batches, group, groups_per_batch
from unimetric.samplers.samples_per_class import SamplesPerClass


class BySource(Sampler):
    """SPC-n within sources: each batch from one dataset or category, or from all by weight.

        a source has the weight  1  (`equal`),  rows  (`proportional`)  or  rows^power  (`power`)
        over an epoch, batches (or groups of a batch, if mixed) are in proportion to the weights

    The source of a class is the beginning of its name, up to the slash number `level`. In a union, classes are
    called `dataset/class`, so level 1 is the dataset. In Stanford Online Products they are called
    `category/number`, so level 1 is the category, and level 2 is the category in a union. Without slashes,
    all rows are one source.

    Batches of one source have only negatives of that source, which are harder. Equal weights keep a large
    dataset of a union from outweighing a small one, whose images then repeat within an epoch. Quotas that are
    not whole numbers are rounded at random, so that they hold on average.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), on the
        imbalance of datasets; power weights as in Exploring the limits of weakly supervised pretraining
        (Mahajan et al., ECCV 2018).

    Args:
        labels: (N,) class of each training row.
        batch_size: Number of rows of a batch, a multiple of n.
        class_names: Name of each class, by label. Provided by the run.
        seed: Seed of the batches.
        n: Number of samples per class.
        weights: Weights of the sources: `equal`, `proportional` to their rows, or a `power` of their rows.
        power: Exponent for `weights='power'`: 0 is equal, 1 is proportional.
        mixed: Whether each batch has all sources in proportion to their weights. If not, it has one.
        level: Number of parts of a class name that are the source.
    """

    def __init__(
        self,
        *,
        labels: Int[np.ndarray, "N"],
        batch_size: Count,
        class_names: Sequence[str] = (),
        seed: Seed = 0,
        n: Count = 2,
        weights: Literal["equal", "proportional", "power"] = "equal",
        power: Fraction = 0.5,
        mixed: bool = False,
        level: Count = 1,
    ) -> None:
        classes, labels = group(labels), np.asarray(labels)
        if not len(class_names):
            labels = classes.number
        elif labels.min() < 0 or labels.max() >= len(class_names):
            raise UnimetricError(
                f"`labels` must be from 0 to {len(class_names) - 1}, got {labels.min()} to {labels.max()}",
                "give the name of each class, by label, as `class_names`",
            )
        owner = sources_of(labels, class_names, level)
        self.rows = [np.flatnonzero(owner == number) for number in range(int(owner.max()) + 1)]
        self.labels, self.batch_size, self.seed, self.n, self.mixed = labels, batch_size, seed, n, mixed
        self.groups, self.steps = groups_per_batch(batch_size, n), batches(len(labels), batch_size)
        exponent = {"equal": 0.0, "proportional": 1.0, "power": power}[weights]
        sizes = np.array([len(rows) for rows in self.rows], np.float64) ** exponent
        self.weights = sizes / sizes.sum()
        single = [labels[rows[0]] for rows in self.rows if (labels[rows] == labels[rows[0]]).all()]
        if single and not mixed:
            message = (
                "by_source: %s of %s sources have one class, such as `%s`, so that their batches have no negatives; consider `mixed=True`"
            )
            name = class_names[single[0]] if len(class_names) else single[0]
            logging.getLogger("unimetric").warning(message, len(single), len(self.rows), name)

    def plan(self) -> Int[np.ndarray, "steps B"]:
        rng = np.random.default_rng((self.seed, self.epoch))
        if self.mixed:
            owner = np.stack([apportion(self.weights, self.groups, rng) for _ in range(self.steps)])
        else:
            owner = apportion(self.weights, self.steps, rng)[:, None].repeat(self.groups, 1)
        plan = np.empty((*owner.shape, self.n), np.int64)
        for number, rows in enumerate(self.rows):
            mine = owner == number
            if mine.any():
                drawn = self._draw(rows, int(mine.sum()), number)
                batch = mine.nonzero()[0]
                for _ in range(2 * self.mixed):  # forwards, then backwards, where the last batches find more groups to swap with
                    drawn, batch = drawn[separate(self.labels[drawn[:, 0]], batch)][::-1], batch[::-1]
                plan[mine] = drawn
        return plan.reshape(self.steps, -1)

    def _draw(self, rows: Int[np.ndarray, " rows"], count: int, number: int) -> Int[np.ndarray, "count n"]:
        """Draw groups of n rows of one class each from one source."""
        size = self.n if self.mixed else self.batch_size
        # Sources must not share random numbers, or those of equal size would be drawn alike.
        inner = SamplesPerClass(labels=self.labels[rows], batch_size=size, seed=(self.seed + 7919 * number) % 2**32, n=self.n)
        inner.epoch, inner.steps = self.epoch, count * self.n // size
        return rows[inner.plan().reshape(count, self.n)]


def sources_of(labels: Int[np.ndarray, "N"], class_names: Sequence[str], level: int) -> Int[np.ndarray, "N"]:
    """Return the number of the source of each row: the beginning of its class name.

    >>> sources_of(np.array([0, 1, 2]), ["cub/jay", "cars/bmw", "cub/owl"], 1)
    array([1, 0, 1])
    """
    if not len(class_names):
        return np.zeros(len(labels), np.int64)
    parts = [name.split("/")[:-1][:level] for name in class_names]
    numbers = np.unique(["/".join(each) for each in parts], return_inverse=True)[1]
    return np.unique(numbers[labels], return_inverse=True)[1]


def separate(classes: Int[np.ndarray, " count"], batch: Int[np.ndarray, " count"]) -> Int[np.ndarray, " count"]:
    """Return an order of groups in which those of a batch have different classes.

    A group of a class that its batch has already is swapped with the next one of another class, if there is one.

    >>> separate(np.array([0, 1, 2, 2, 0, 1]), np.array([0, 0, 1, 1, 2, 2]))
    array([0, 1, 2, 4, 3, 5])

    Args:
        classes: Class of each group.
        batch: Batch of each place; those of a batch are adjacent.
    """
    order, total, held = list(range(len(classes))), len(np.unique(classes)), set[int]()
    for place in range(len(order)):
        if (place and batch[place] != batch[place - 1]) or len(held) == total:
            held.clear()
        later = range(place, min(place + 2 * total, len(order)))
        fresh = next((other for other in later if int(classes[order[other]]) not in held), place)
        order[place], order[fresh] = order[fresh], order[place]
        held.add(int(classes[order[place]]))
    return np.array(order)


def apportion(weights: Float[np.ndarray, "S"], count: int, rng: np.random.Generator) -> Int[np.ndarray, " count"]:
    """Assign `count` places to sources in proportion to their weights, in random order.

    Each source gets its quota, rounded up or down at random so that its mean is the quota.

    >>> apportion(np.array([0.25, 0.75]), 8, np.random.default_rng(0)).sum()
    np.int64(6)
    """
    ends = np.cumsum(weights) * count
    ends[-1] = count  # sums of fractions round
    return rng.permutation(np.searchsorted(ends, (np.arange(count) + rng.random()), side="right").clip(max=len(weights) - 1))
