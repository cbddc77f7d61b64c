"""Make splits of growing distance by swapping and removing classes, and select some."""

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

    def order(self, train: np.ndarray, test: np.ndarray, *, reverse: bool = False, minus_own: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Order the classes of each side, those closest to the other side's mean first.

            |c - mu_other| - |c - mu_own|   (eqs. 2 and 3)

        Args:
            train: Training classes.
            test: Test classes.
            reverse: Whether the closest are last.
            minus_own: Whether the distance to the mean of a class's own side is subtracted.

        Returns:
            Positions in `train` and in `test`.
        """
        centers = self.means[train].mean(0), self.means[test].mean(0)

        def score(classes: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
            points = self.means[classes]
            away = np.linalg.norm(points - other, axis=1)
            return away - np.linalg.norm(points - own, axis=1) if minus_own else away

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
        (Milbich et al., NeurIPS 2021), section 3.3.

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
        pairs = _pairs(shift.order(train, test, reverse=reverse), swaps, recent)
        if pairs is None:
            return  # every class was swapped recently
        for first, second in pairs:
            train[first], test[second] = test[second], train[first]
        step = shift.measure(f"{'-' if reverse else ''}{number * swaps}", train, test)
        if plateau and (step.distance >= before if reverse else step.distance <= before):
            return
        before = step.distance
        yield step


def _first_free(order: np.ndarray, recent: deque[int]) -> int | None:
    """Return the first position that is not a recent one, or None."""
    return next((int(position) for position in order if position not in recent), None)


def removed(shift: ClassShift, start: Step, *, classes: int = 2, least: float = 0.5) -> Iterator[Step]:
    """Yield splits that grow harder by removing the classes closest to the other side's mean.

        of the train classes, those with the least  |c - mu_test|  are removed, and
        of the test classes, those with the least   |c - mu_train|

    Classes are removed as long as half of the images are left.

    Differs from the paper:
        Nothing. The authors' script is `scripted_removal`.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021), section 3.3.

    Args:
        shift: Classes of the dataset.
        start: First split, which is not yielded.
        classes: Number of classes of each side that are removed per step.
        least: Least fraction of images that must be left.
    """
    train, test, gone = start.train, start.test, 0
    while min(len(train), len(test)) - classes >= 2:
        first, second = (order[:classes] for order in shift.order(train, test, minus_own=False))
        train, test = np.delete(train, first), np.delete(test, second)
        gone += classes
        step = shift.measure(f"R{gone}", train, test)
        if step.share < least:
            return
        yield step


def scripted_removal(shift: ClassShift, start: Step, *, classes: int = 2, history: int = 5, count: int = 35) -> Iterator[Step]:
    """Yield splits by the removal rule of the authors' script.

    The script made the published splits. Each step selects classes as `swapped` does, by the difference of
    two distances and without recent positions. It swaps them if that lowers the distance, and otherwise
    removes them.

    Differs from the paper:
        In the text, classes are selected by their distance to the other side's mean alone, and always
        removed (`removed`). The published splits 6 and 7 of Cars196 follow the script: 12 classes of each
        side are removed between them, and one class of each side changes sides. Keys count removed
        classes; the script's keys count inspected ones.

    Reference:
        `split_maker_with_class_removal` in CompVis/Characterizing_Generalization_in_DML.

    Args:
        shift: Classes of the dataset.
        start: First split, which is not yielded.
        classes: Number of classes of each side that are inspected per step.
        history: Number of recent positions of each side that are skipped.
        count: Number of steps. The script has no least number of images.
    """
    train, test, distance, gone = start.train, start.test, start.distance, 0
    recent: tuple[deque[int], deque[int]] = deque(maxlen=history), deque(maxlen=history)
    for number in range(1, count + 1):
        if min(len(train), len(test)) - classes < 2:
            return
        pairs = _pairs(shift.order(train, test), classes, recent)
        if pairs is None:
            return  # every class was selected recently
        after_train, after_test = train.copy(), test.copy()
        for first, second in pairs:
            after_train[first], after_test[second] = after_test[second], after_train[first]
        step = shift.measure(f"R{gone}s{number}", after_train, after_test)
        if step.distance >= distance:
            positions = [sorted({pair[side] for pair in pairs}) for side in (0, 1)]
            gone += len(positions[0])
            step = shift.measure(f"R{gone}", np.delete(train, positions[0]), np.delete(test, positions[1]))
        train, test, distance = step.train, step.test, step.distance
        yield step


def _pairs(orders: tuple[np.ndarray, np.ndarray], count: int, recent: tuple[deque[int], deque[int]]) -> list[tuple[int, int]] | None:
    """Select positions of both sides in their order and add them to the recent ones.

    Returns None if one of the sides has no free position.
    """
    found = []
    for turn in range(count):
        first, second = (_first_free(order[turn:], passed) for order, passed in zip(orders, recent, strict=True))
        if first is None or second is None:
            return None
        recent[0].append(first)
        recent[1].append(second)
        found.append((first, second))
    return found


def plateau_of(distances: Sequence[float]) -> int:
    """Return the index after which the distance first stops rising.

    >>> plateau_of([1.0, 3.0, 4.0, 3.9, 4.2])
    2
    """
    return next((index for index in range(len(distances) - 1) if distances[index + 1] <= distances[index]), len(distances) - 1)


# Distances of the papers' splits (supplement, table 1), as multiples of the default split's.
PAPER_TARGETS = {
    "cub200": [distance / 52.62 for distance in (19.16, 28.49, 52.62, 72.20, 92.48, 120.38, 136.45, 152.04, 173.94)],
    "cars196": [distance / 8.59 for distance in (8.59, 14.33, 32.18, 43.58, 63.29, 86.48, 101.17, 123.03)],
    "sop": [distance / 3.43 for distance in (3.43, 24.59, 53.47, 99.38, 135.53, 155.25, 189.81, 235.10)],
}


def nearest(distances: Sequence[float], targets: Sequence[float], *, keep: int | None = None) -> list[int]:
    """Assign a different split to each target distance, with the least sum of deviations.

    A larger target gets a split of larger distance.

    Args:
        distances: Distances of all splits.
        targets: Target distances.
        keep: Index of a split that is always among the selected ones, in place of the split of the
            nearest target.

    >>> nearest([1.0, 2.0, 5.0, 9.0], [2.1, 6.0])
    [1, 2]
    >>> nearest([1.0, 2.0, 5.0, 9.0], [2.1, 6.0], keep=0)
    [0, 2]
    """
    if not 0 < len(targets) <= len(distances):
        raise UnimetricError(
            f"the number of selected splits must be from 1 to {len(distances)}, got {len(targets)}",
            "select fewer, or make a longer sequence",
        )
    cost = np.abs(np.asarray(targets, float)[:, None] - np.asarray(distances, float)[None, :])
    if keep is not None:
        cost[cost[:, keep].argmin(), keep] = -2 * cost.sum()  # below any sum of the others
    chosen = sorted((int(column) for column in linear_sum_assignment(cost)[1]), key=distances.__getitem__)
    return [chosen[rank] for rank in np.argsort(np.argsort(targets, kind="stable"))]


def even_targets(distances: Sequence[float], count: int, *, keep: int) -> list[float]:
    """Return target distances that cover the range evenly, one of them that of a given split.

    Args:
        distances: Distances of all splits.
        count: Number of targets.
        keep: Index of the given split. Its distance replaces the nearest target. With at least three
            targets, the easiest and the hardest split stay.

    >>> even_targets([1.0, 2.0, 2.1, 5.0, 9.0], 3, keep=1)
    [1.0, 2.0, 9.0]
    """
    if count < 1:
        return []
    targets = np.linspace(min(distances), max(distances), count)
    away = np.abs(targets - distances[keep])
    if count > 2 and distances[keep] not in (targets[0], targets[-1]):
        away[[0, -1]] = np.inf
    targets[away.argmin()] = distances[keep]
    return targets.tolist()
