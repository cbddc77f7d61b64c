"""Labels that the rest of the gallery contradicts."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from unimetric.arguments import Count, Range
from unimetric.kinds import Audited, Findings, Group

#: Share that each label has without a neighbor, images that settings are chosen on, and images that are computed at a time.
_FLOOR, _SAMPLE, _CHUNK = 0.01, 2000, 1024
#: Fraction of wrong labels that the likelihood expects. Without it, every wrong label makes all probabilities less certain.
_WRONG = 0.05
#: Penalties of the classifier that are tried, as fractions of the variance of all points.
_PENALTIES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1)


def suspicious_labels(gallery: Audited, *, neighbors: Count = 20, ratio: Annotated[float, Range(0, 1)] = 0.1) -> Findings:
    """Images whose label the neighbors and a classifier of all other images contradict.

        p(c) ~ sqrt((share of the label c among the neighbors + 0.01) * exp(t * g(c)))
        reported if  p(own label) <= ratio * max p(other label),   smallest p(own label) first

    g(c) is the score of a least-squares classifier that was fitted without the image. Neighbors separate classes of any shape, and the
    classifier separates classes that share neighbors; either alone finds less. The root is taken because both use the same images. The
    factor t is that of the largest likelihood of the labels, of which 5 % may be wrong. The nearest neighbor has the largest weight.
    Images without a label have none. At most twice as many neighbors count as the class has other images, so that small classes are not
    reported for their size.

    Reference:
        Asymptotic properties of nearest neighbor rules using edited data (Wilson, IEEE Transactions on
        Systems, Man, and Cybernetics 1972); out-of-sample probabilities as in Confident learning
        (Northcutt et al., JAIR 2021); exact leave-one-out residuals (Allen, Technometrics 1974).

    Args:
        gallery: Images.
        neighbors: Largest number of neighbors that count.
        ratio: Largest probability of an image's label, as a fraction of that of the most probable other label.
    """
    title = "Suspicious labels"
    note = (
        "Neighbors and a classifier of all other images contradict these labels. "
        "The label or the image is wrong, or both classes contain the same motive."
    )
    labeled = np.flatnonzero([label is not None for label in gallery.labels])
    names, numbers = np.unique([str(gallery.labels[row]) for row in labeled.tolist()], return_inverse=True)
    if len(names) < 2:
        return Findings(title, note)
    own, best, other, near = _probabilities(gallery, labeled, numbers, neighbors)
    several = np.bincount(numbers)[numbers] > 1  # the only image of a class has no neighbor of its label
    reported = several & (own <= ratio * other) & (own < other)
    order = [int(each) for each in np.argsort(own, kind="stable") if reported[each]]
    groups, rows = [], []
    for each in order:
        row, nearest = labeled[each], near[each][:4]
        caption = f"labeled {names[numbers[each]]}, probably {names[best[each]]}"
        shown = ["suspicious", *(str(gallery.labels[neighbor]) for neighbor in nearest)]
        groups.append(Group(caption, [gallery.ids[row], *(gallery.ids[neighbor] for neighbor in nearest)], shown))
        rows.append(
            {
                "id": gallery.ids[row],
                "label": names[numbers[each]],
                "suggested": names[best[each]],
                "probability": round(float(own[each]), 6),
                "probability of suggested": round(float(other[each]), 4),
            }
        )
    return Findings(title, note, groups, rows)


def _probabilities(
    gallery: Audited, labeled: np.ndarray, numbers: np.ndarray, neighbors: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Compare the label of each image with the best other one.

    Returns:
        Per labeled image: probability of its label, best other label, its probability, and the labeled neighbors.
    """
    near, weights = _neighbors(gallery, labeled, numbers, neighbors)
    class_of = np.full(len(gallery.ids), -1)
    class_of[labeled] = numbers
    classifier = Classifier(gallery.space.points[torch.from_numpy(labeled)], torch.from_numpy(numbers))

    def log_shares(rows: np.ndarray) -> Tensor:
        shares = np.full((len(rows), classifier.classes), _FLOOR)
        for place, row in enumerate(rows):
            np.add.at(shares[place], class_of[near[row]], weights[row])
        return torch.from_numpy(shares).log()

    sample = np.arange(0, len(labeled), -(-len(labeled) // _SAMPLE))
    classifier.choose_penalty(torch.from_numpy(sample))
    scores, shares, truth = classifier.leave_one_out(torch.from_numpy(sample)), log_shares(sample), torch.from_numpy(numbers[sample])

    def loss(exponent: float) -> float:
        own = (shares + 2.0**exponent * scores).softmax(1).gather(1, truth[:, None])
        return -float(((1 - _WRONG) * own + _WRONG / classifier.classes).log().mean())

    factor = 2.0 ** float(minimize_scalar(loss, bounds=(-4, 8), method="bounded", options={"xatol": 0.05}).x)
    parts = []
    for start in range(0, len(labeled), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(labeled)))
        chances = ((log_shares(rows) + factor * classifier.leave_one_out(torch.from_numpy(rows))) / 2).softmax(1)
        place = torch.from_numpy(numbers[rows])[:, None]
        other, best = chances.scatter(1, place, -1.0).max(1)
        parts.append((chances.gather(1, place)[:, 0].numpy(), best.numpy(), other.numpy()))
        gallery.progress("comparing labels", int(rows[-1]) + 1, len(labeled))
    own, best_, other_ = (np.concatenate(each) for each in zip(*parts, strict=True))
    return own, best_, other_, near


def _neighbors(gallery: Audited, labeled: np.ndarray, numbers: np.ndarray, neighbors: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the labeled neighbors of labeled images, and their weights, which sum to 1."""
    has_label = np.zeros(len(gallery.ids), bool)
    has_label[labeled] = True
    count = min(neighbors, len(gallery.ids) - 1)
    found, scores = (each.numpy()[labeled] for each in gallery.space.neighbors(count, scores=True))
    # The scale of the scores depends on the geometry, so that of the gallery is used.
    scale = max(float(np.median(scores[:, :1] - scores)), 1e-6)
    most = 2 * (np.bincount(numbers)[numbers] - 1)
    near, weights = [], []
    for row, (some, values) in enumerate(zip(found, scores, strict=True)):
        voting = has_label[some] & (np.arange(len(some)) < max(most[row], 1))
        weight = np.exp((values[voting] - values[:1]) / scale)
        near.append(some[voting])
        weights.append(weight / max(weight.sum(), 1e-12))
    return near, weights


class Classifier:
    """Least-squares classifier with exact scores of each point by the fit of all others.

        g = y - (y - f) / (1 - h),   h: leverage of the point,   f: its score in the fit of all points

    Args:
        points: (N, D) points.
        numbers: (N,) class of each point.
    """

    def __init__(self, points: Tensor, numbers: Tensor) -> None:
        self.points, self.numbers, self.classes = points, numbers, int(numbers.max()) + 1
        self.mean = points.double().mean(0)
        moments = torch.zeros(points.shape[1], points.shape[1], dtype=torch.float64)
        sums = torch.zeros(self.classes, points.shape[1], dtype=torch.float64)
        for start in range(0, len(points), 8 * _CHUNK):  # float64 copies of all points take too much memory
            some = points[start : start + 8 * _CHUNK].double() - self.mean
            moments += some.mT @ some
            sums.index_add_(0, numbers[start : start + 8 * _CHUNK], some)
        self.values, self.directions = torch.linalg.eigh(moments)
        self.sums = self.directions.mT @ sums.mT
        self.fractions = torch.bincount(numbers, minlength=self.classes).double() / len(points)
        self.penalty = 1e-3 * float(moments.trace())

    def leave_one_out(self, rows: Tensor) -> Tensor:
        """Return the scores (R, classes) of points in the fits without each of them."""
        along = (self.points[rows].double() - self.mean) @ self.directions
        inverse = 1 / (self.values.clamp_min(0) + self.penalty)
        leverage = ((along.square() * inverse).sum(1) + 1 / len(self.points)).clamp_max(1 - 1e-6)[:, None]
        target = torch.nn.functional.one_hot(self.numbers[rows], self.classes).double() - self.fractions
        return target - (target - (along * inverse) @ self.sums) / (1 - leverage)

    def choose_penalty(self, rows: Tensor) -> None:
        """Choose the penalty by the squared error of the scores of some points."""
        target = torch.nn.functional.one_hot(self.numbers[rows], self.classes).double() - self.fractions
        total = max(float(self.values.clamp_min(0).sum()), 1e-12)
        errors = {}
        for fraction in _PENALTIES:
            self.penalty = fraction * total
            errors[self.penalty] = float((target - self.leave_one_out(rows)).square().mean())
        self.penalty = min(errors, key=errors.__getitem__)
