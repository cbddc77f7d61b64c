"""Labels that the neighbors of an image contradict."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from unimetric.arguments import Count, Range
from unimetric.kinds import Audited, Findings, Group


def suspicious_labels(gallery: Audited, *, neighbors: Count = 20, ratio: Annotated[float, Range(0, 1)] = 0.2) -> Findings:
    """Images whose neighbors have other labels.

        p(c) = share of the label c among the neighbors of an image
        reported if  p(own label) <= ratio * max p(other label),   largest difference of both first

    The nearest neighbor has the largest weight. Images without a label have none. At most twice as many neighbors count as
    the class has other images, so that small classes are not reported for their size.

    Reference:
        Asymptotic properties of nearest neighbor rules using edited data (Wilson, IEEE Transactions on
        Systems, Man, and Cybernetics 1972); neighbors as a test of labels as in Detecting corrupted labels
        without training a model to predict (Zhu et al., ICML 2022).

    Args:
        gallery: Images.
        neighbors: Largest number of neighbors that count.
        ratio: Largest share of an image's label among its neighbors, as a fraction of the most frequent other label's.
    """
    title = "Suspicious labels"
    note = "The neighbors of these images have another label. The label or the image is wrong, or both classes contain the same motive."
    labeled = np.flatnonzero([label is not None for label in gallery.labels])
    names, numbers = np.unique([str(gallery.labels[row]) for row in labeled.tolist()], return_inverse=True)
    if len(names) < 2:
        return Findings(title, note)
    near, votes = _votes(gallery, labeled, numbers, len(names), neighbors)
    own = votes[np.arange(len(labeled)), numbers]
    others = votes.copy()
    others[np.arange(len(labeled)), numbers] = -1
    best = others.argmax(1)
    suspicion = others.max(1) - own
    several = np.bincount(numbers)[numbers] > 1  # the only image of a class has no neighbor of its label
    reported = several & (own <= ratio * others.max(1)) & (suspicion > 0)
    order = [int(each) for each in np.argsort(-suspicion, kind="stable") if reported[each]]
    groups, rows = [], []
    for each in order:
        row, nearest = labeled[each], near[each][:4]
        caption = f"labeled {names[numbers[each]]}, neighbors say {names[best[each]]}"
        shown = ["suspicious", *(str(gallery.labels[other]) for other in nearest)]
        groups.append(Group(caption, [gallery.ids[row], *(gallery.ids[other] for other in nearest)], shown))
        rows.append(
            {
                "id": gallery.ids[row],
                "label": names[numbers[each]],
                "suggested": names[best[each]],
                "suspicion": round(float(suspicion[each]), 4),
                "share": round(float(own[each]), 4),
            }
        )
    return Findings(title, note, groups, rows)


def _votes(gallery: Audited, labeled: np.ndarray, numbers: np.ndarray, classes: int, neighbors: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the labeled neighbors of labeled images, and the shares of their labels."""
    class_of = np.full(len(gallery.ids), -1)
    class_of[labeled] = numbers
    count = min(neighbors, len(gallery.ids) - 1)
    found, scores = (each.numpy()[labeled] for each in gallery.space.neighbors(count, scores=True))
    near, votes = [], np.zeros((len(labeled), classes))
    # The scale of the scores depends on the geometry, so that of the gallery is used.
    scale = max(float(np.median(scores[:, :1] - scores)), 1e-6)
    most = 2 * (np.bincount(numbers)[numbers] - 1)
    for row, (some, values) in enumerate(zip(found, scores, strict=True)):
        voting = (class_of[some] >= 0) & (np.arange(len(some)) < max(most[row], 1))
        weights = np.exp((values[voting] - values[:1]) / scale)
        np.add.at(votes[row], class_of[some[voting]], weights / max(weights.sum(), 1e-12))
        near.append(some[voting])
    return near, votes
