"""Outliers by the distance to their neighbors."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from unimetric.arguments import Count, Range
from unimetric.kinds import Audited, Findings, Group


def outliers(gallery: Audited, *, neighbors: Count = 5, spread: Annotated[float, Range(above=0)] = 3.5) -> Findings:
    """Images that are far from all others.

        z = (median of all scores - score) / (1.4826 * median absolute deviation),   z > spread

    The score of an image is the mean similarity to its nearest neighbors.

    Reference:
        Efficient algorithms for mining outliers from large data sets (Ramaswamy et al., SIGMOD 2000).

    Args:
        gallery: Images.
        neighbors: Number of neighbors.
        spread: Number of robust standard deviations from which an image is an outlier.
    """
    title, note = "Outliers", "Images that are far from all others: other motives, broken or empty images, or rare cases."
    count = min(neighbors, len(gallery.ids) - 1)
    if count < 1:
        return Findings(title, note)
    near, scores = gallery.space.neighbors(count, scores=True)
    mean = scores.double().mean(1).numpy()
    middle = float(np.median(mean))
    deviation = 1.4826 * float(np.median(np.abs(mean - middle)))
    # The deviation of many copies is zero or the rounding error of their scores.
    z = (middle - mean) / max(deviation, 1e-6 * float(np.abs(mean).max()), 1e-12)
    order = [int(row) for row in np.argsort(-z, kind="stable") if z[row] > spread]
    groups = [
        Group(
            f"{z[row]:.1f} standard deviations",
            [gallery.ids[row], *(gallery.ids[int(each)] for each in near[row, :3])],
            ["outlier", "nearest", "", ""][: 1 + min(3, count)],
        )
        for row in order
    ]
    rows = [
        {
            "id": gallery.ids[row],
            "deviations": round(float(z[row]), 2),
            "nearest": gallery.ids[int(near[row, 0])],
            "label": gallery.labels[row],
        }
        for row in order
    ]
    return Findings(title, note, groups, rows)
