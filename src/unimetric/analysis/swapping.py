"""Make splits of growing distance by swapping and removing classes, and choose some of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from unimetric.errors import UnimetricError
from unimetric.geometry.frechet import frechet_distance


@dataclass(frozen=True, eq=False)
class Step:
    """One split of a sequence.

    Args:
        key: How it was made. `0` is the start, `12` follows from 12 swaps, `-12` from 12 swaps towards an
            easier split, `R12` from removing 12 classes of each side.
        train: Training classes.
        test: Test classes.
        distance: Frechet distance between their class means.
        share: Fraction of all images that are left.
    """

    key: str
    train: Int[np.ndarray, "P"]
    test: Int[np.ndarray, "Q"]
    distance: float
    share: float


class ClassShift:
    """Distances and orders of the classes of a dataset, by their means.

    Args:
        means: (K, D) mean feature of each class, not normalized.
        images: (K,) number of images of each class.
    """

    def __init__(self, means: Float[np.ndarray, "K D"], images: Int[np.ndarray, "K"]) -> None:
        self.means, self.images = np.asarray(means, np.float64), np.asarray(images)

    def measure(self, key: str, train: np.ndarray, test: np.ndarray) -> Step:
        """Return a split with its distance and the fraction of images that are left."""
        distance = frechet_distance(torch.from_numpy(self.means[train]), torch.from_numpy(self.means[test]))
        left = self.images[train].sum() + self.images[test].sum()
        return Step(key, train.copy(), test.copy(), float(distance), float(left / self.images.sum()))

    def order(self, train: np.ndarray, test: np.ndarray, *, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Order the classes of each side, those nearest to the other side's mean first (eqs. 2 and 3).

        Args:
            train: Training classes.
            test: Test classes.
            reverse: Whether the nearest are last.

        Returns:
            Positions in `train` and in `test`.
        """
        centers = self.means[train].mean(0), self.means[test].mean(0)

        def score(classes: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
            points = self.means[classes]
            return np.linalg.norm(points - other, axis=1) - np.linalg.norm(points - own, axis=1)

        ranks = [np.argsort(values, kind="stable") for values in (score(train, *centers), score(test, *centers[::-1]))]
        return (ranks[0][::-1], ranks[1][::-1]) if reverse else (ranks[0], ranks[1])


def swapped(
    shift: ClassShift, start: Step, *, swaps: int = 2, count: int = 25, history: int = 5, reverse: bool = False, plateau: bool = False
) -> Iterator[Step]:
    """Yield splits that grow harder by swapping classes; with `reverse`, easier.

        the train class with the least  |c - mu_test| - |c - mu_train|  swaps with
        the test class with the least   |c - mu_train| - |c - mu_test|

    Differs from the paper:
        As in the authors' code, the order is computed once per step, recently filled positions are
        skipped so that no class returns at once, and `count` splits are made. The paper stops when the
        distance no longer rises (`plateau`).

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021), section 3.1.

    Args:
        shift: Classes of the dataset.
        start: First split, which is not yielded.
        swaps: Number of swaps per step: 2 for CUB and Cars196, 1,000 for SOP.
        count: Number of splits, including the start: 25, or 15 for the reverse sequence.
        history: Number of recent positions of each side that are skipped: 5, or 30 for the reverse sequence.
        reverse: Whether the splits grow easier.
        plateau: Whether to stop before the first split that is not harder (with `reverse`, not easier).
    """
    train, test, before = start.train.copy(), start.test.copy(), start.distance
    recent: tuple[deque[int], deque[int]] = deque(maxlen=history), deque(maxlen=history)
    for number in range(1, count):
        orders = shift.order(train, test, reverse=reverse)
        for turn in range(swaps):
            first = _first_free(orders[0][turn:], recent[0])
            second = _first_free(orders[1][turn:], recent[1])
            if first is None or second is None:
                return  # every class was swapped recently
            train[first], test[second] = test[second], train[first]
            recent[0].append(first)
            recent[1].append(second)
        step = shift.measure(f"{'-' if reverse else ''}{number * swaps}", train, test)
        if plateau and (step.distance >= before if reverse else step.distance <= before):
            return
        before = step.distance
        yield step


def _first_free(order: np.ndarray, recent: deque[int]) -> int | None:
    """Return the first position that is not a recent one, or None."""
    return next((int(position) for position in order if position not in recent), None)


def removed(
    shift: ClassShift, start: Step, *, classes: int = 2, least: float = 0.5, code_removal: bool = False, count: int = 35
) -> Iterator[Step]:
    """Yield splits that grow harder by removing the classes nearest to the other side's mean.

    Differs from the paper:
        Nothing by default: classes are removed while at least half of the images are left. With
        `code_removal`, as in the authors' script, the classes are swapped first, and removed only if the
        swap does not lower the distance. Keys count removed classes; the script's count inspected ones.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021), section 3.1.

    Args:
        shift: Classes of the dataset.
        start: First split, which is not yielded.
        classes: Number of classes of each side that are removed per step.
        least: Least fraction of images that must be left. The script has no such limit.
        code_removal: Whether to follow the authors' script.
        count: Number of steps of the script.
    """
    train, test, now = start.train.copy(), start.test.copy(), start
    gone, inspected = 0, 0
    while min(len(train), len(test)) - classes >= 2 and (not code_removal or inspected < count):
        inspected += 1
        first, second = (order[:classes] for order in shift.order(train, test))
        if code_removal:
            swapped_train, swapped_test = train.copy(), test.copy()
            swapped_train[first], swapped_test[second] = test[second], train[first]
            step = shift.measure(f"R{gone}s{inspected}", swapped_train, swapped_test)
            if step.distance < now.distance:
                train, test, now = swapped_train, swapped_test, step
                yield step
                continue
        train, test = np.delete(train, first), np.delete(test, second)
        gone += classes
        step = shift.measure(f"R{gone}", train, test)
        if step.share < least and not code_removal:
            return
        now = step
        yield step


def plateau_of(distances: Sequence[float]) -> int:
    """Return the index after which the distance first stops rising.

    >>> plateau_of([1.0, 3.0, 4.0, 3.9, 4.2])
    2
    """
    return next((index for index in range(len(distances) - 1) if distances[index + 1] <= distances[index]), len(distances) - 1)


def nearest(distances: Sequence[float], targets: Sequence[float]) -> list[int]:
    """Assign a different split to each target distance, with the least sum of deviations.

    A larger target gets a split of larger distance. Milbich et al. 2021 list their targets in table 1.

    Args:
        distances: Distances of all splits.
        targets: Target distances.

    >>> nearest([1.0, 2.0, 5.0, 9.0], [2.1, 6.0])
    [1, 2]
    """
    if not 0 < len(targets) <= len(distances):
        raise UnimetricError(
            f"the number of selected splits must be from 1 to {len(distances)}, got {len(targets)}",
            "select fewer, or make a longer sequence",
        )
    cost = np.abs(np.asarray(targets, float)[:, None] - np.asarray(distances, float)[None, :])
    chosen = sorted((int(column) for column in linear_sum_assignment(cost)[1]), key=distances.__getitem__)
    return [chosen[rank] for rank in np.argsort(np.argsort(targets, kind="stable"))]


def evenly(distances: Sequence[float], count: int) -> list[int]:
    """Select splits that cover the range of distances evenly, from the easiest to the hardest.

    Args:
        distances: Distances of all splits.
        count: Number of splits to select.

    >>> evenly([1.0, 2.0, 2.1, 5.0, 9.0], 3)
    [0, 3, 4]
    """
    return nearest(distances, list(np.linspace(min(distances), max(distances), count)) if count > 0 else [])
