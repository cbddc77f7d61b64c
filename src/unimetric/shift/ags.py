"""One number for a whole range of shifts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unimetric.errors import UnimetricError


def ags(distances: Sequence[float], scores: Sequence[float]) -> float:
    """The aggregated generalization score of Milbich et al., Characterizing generalization under out-of-distribution shifts (NeurIPS 2021).

        area under the scores over  x = (F - min F) / (max F - min F),  by the trapezoid rule

    so that splits count by the range of shifts that they stand for, and not by how many there are. The paper says "normalised to [0, 1]";
    that the smallest distance is subtracted first follows from its tables (divided by the largest alone, margin on CUB would be 56.6).

    Args:
        distances: Frechet distance of each split; any order.
        scores: of one method, such as recall@1 on each split.

    >>> ags([10, 20, 40], [0.8, 0.7, 0.4])
    0.6166666666666667
    """
    x, y = np.asarray(distances, float), np.asarray(scores, float)
    if len(x) != len(y) or len(x) < 2 or x.min() == x.max():
        raise UnimetricError(f"{len(x)} distances and {len(y)} scores make no area", "give two splits of different distance at least")
    order = np.argsort(x, kind="stable")
    x, y = (x[order] - x.min()) / (x.max() - x.min()), y[order]
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum())
