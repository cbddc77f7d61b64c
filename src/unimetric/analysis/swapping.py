"""Make splits of growing distance by swapping and removing classes, and choose some of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from unimetric.errors import UnimetricError
from unimetric.geometry.frechet import frechet_distance

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Step:
    """One split of a sequence.

    Args:
        key: how it was made: `0` is the start, `12` came by exchanging 12 classes of each side, `-12` by 12 exchanges towards an easier
            split, `R12` by removing 12 classes of each side.
        train, test: numbers of the classes.
        distance: Frechet distance between their class means.
        share: of all pictures that are left.
    """

    key: str
    train: Int[np.ndarray, "P"]
    test: Int[np.ndarray, "Q"]
    distance: float
    share: float


class ClassShift:
    """Measures and changes splits of one dataset by the means of its classes.

    Args:
        means: (K, D) mean feature of each class, not normalised.
        pictures: (K,) pictures of each class.
    """

    def __init__(self, means: Float[np.ndarray, "K D"], pictures: Int[np.ndarray, "K"]) -> None:
        self.means, self.pictures = np.asarray(means, np.float64), np.asarray(pictures)

    def measure(self, key: str, train: np.ndarray, test: np.ndarray) -> Step:
        """A split with its distance and what is left of the pictures."""
        distance = frechet_distance(torch.from_numpy(self.means[train]), torch.from_numpy(self.means[test]))
        left = self.pictures[train].sum() + self.pictures[test].sum()
        return Step(key, train.copy(), test.copy(), float(distance), float(left / self.pictures.sum()))

    def order(self, train: np.ndarray, test: np.ndarray, *, reverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Positions of both sides by how much nearer a class lies to the other side's mean than to its own (eqs. 2 and 3)."""
        centres = self.means[train].mean(0), self.means[test].mean(0)

        def score(classes: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
            points = self.means[classes]
            return np.linalg.norm(points - other, axis=1) - np.linalg.norm(points - own, axis=1)

        ranks = [np.argsort(values, kind="stable") for values in (score(train, *centres), score(test, *centres[::-1]))]
        return (ranks[0][::-1], ranks[1][::-1]) if reverse else (ranks[0], ranks[1])


def swapped(
    shift: ClassShift, start: Step, *, swaps: int = 2, count: int = 25, history: int = 5, reverse: bool = False, plateau: bool = False
) -> Iterator[Step]:
    """Splits that grow harder by exchanging classes (Milbich et al., NeurIPS 2021, sec. 3.1); with `reverse`, easier.

        a train class with the least  |c - mu_test| - |c - mu_train|  against a test class with the least  |c - mu_train| - |c - mu_test|

    As in the authors' code, orders are made once before the exchanges of a step, a place that was filled lately is passed over, so that no
    class goes straight back, and a fixed number of splits is made; the paper stops when the distance no longer rises (`plateau`).

    Args:
        shift: the dataset.
        start: the split to start from; it is not given again.
        swaps: exchanges a step, each of one class a side; 2 for CUB and Cars196, 1,000 for SOP.
        count: splits of the sequence, the start among them; 25, and 15 for the reverse one.
        history: places of each side that are passed over; 5, and 30 for the reverse one.
        reverse: make it easier.
        plateau: stop before the first split that is no harder (with `reverse`, no easier) than the one before.
    """
    train, test, before = start.train.copy(), start.test.copy(), start.distance
    recent: tuple[deque[int], deque[int]] = deque(maxlen=history), deque(maxlen=history)
    for number in range(1, count):
        orders = shift.order(train, test, reverse=reverse)
        for turn in range(swaps):
            places = [
                next((int(place) for place in order[turn:] if place not in past), -1) for order, past in zip(orders, recent, strict=True)
            ]
            if -1 in places:
                return  # fewer classes than places to pass over
            train[places[0]], test[places[1]] = test[places[1]], train[places[0]]
            for place, past in zip(places, recent, strict=True):
                past.append(place)
        step = shift.measure(f"{'-' if reverse else ''}{number * swaps}", train, test)
        if plateau and (step.distance >= before if reverse else step.distance <= before):
            return
        before = step.distance
        yield step


def removed(
    shift: ClassShift, start: Step, *, classes: int = 2, least: float = 0.5, code_removal: bool = False, count: int = 35
) -> Iterator[Step]:
    """Splits that grow harder still by removing, from both sides, the classes nearest to the other side's mean (Milbich et al. 2021).

    By the paper's words: nothing is exchanged, and it stops before less than half of the pictures are left. The authors' script exchanges
    the classes first and deletes them only where that does not lower the distance, else leaves them exchanged; `code_removal` does as it
    does. Keys say how many classes of each side are gone (the script's say how many were looked at).

    Args:
        shift: the dataset.
        start: the split to start from; it is not given again.
        classes: of each side, removed a step.
        least: share of all pictures that must be left; the script does not ask.
        code_removal: the literal script, `count` steps of it.
        count: steps of the literal script.
    """
    train, test, now = start.train.copy(), start.test.copy(), start
    gone, looked = 0, 0
    while min(len(train), len(test)) - classes >= 2 and (not code_removal or looked < count):
        looked += 1
        first, second = (order[:classes] for order in shift.order(train, test))
        if code_removal:
            swapped_train, swapped_test = train.copy(), test.copy()
            swapped_train[first], swapped_test[second] = test[second], train[first]
            step = shift.measure(f"R{gone}s{looked}", swapped_train, swapped_test)
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
    """The place in a sequence after which the distance rises no more for the first time.

    >>> plateau_of([1.0, 3.0, 4.0, 3.9, 4.2])
    2
    """
    return next((place for place in range(len(distances) - 1) if distances[place + 1] <= distances[place]), len(distances) - 1)


def nearest(distances: Sequence[float], targets: Sequence[float]) -> list[int]:
    """A split for each wanted distance, no split twice, with the least deviation in sum (Milbich et al. 2021, whose targets are table 1's).

    A larger target gets a split of larger distance: of the choices that deviate as little, one that is in order.

    Args:
        distances: of the splits there are.
        targets: the distances wanted.

    >>> nearest([1.0, 2.0, 5.0, 9.0], [2.1, 6.0])
    [1, 2]
    """
    if not 0 < len(targets) <= len(distances):
        raise UnimetricError(f"{len(targets)} splits cannot be chosen from {len(distances)}", "ask for fewer, or make a longer sequence")
    cost = np.abs(np.asarray(targets, float)[:, None] - np.asarray(distances, float)[None, :])
    chosen = sorted((int(column) for column in linear_sum_assignment(cost)[1]), key=distances.__getitem__)
    return [chosen[rank] for rank in np.argsort(np.argsort(targets, kind="stable"))]


def evenly(distances: Sequence[float], count: int) -> list[int]:
    """Splits that cover the range of distances evenly, from the easiest to the hardest.

    Args:
        distances: of the splits there are.
        count: how many to choose.

    >>> evenly([1.0, 2.0, 2.1, 5.0, 9.0], 3)
    [0, 3, 4]
    """
    return nearest(distances, list(np.linspace(min(distances), max(distances), count)) if count > 0 else [])
