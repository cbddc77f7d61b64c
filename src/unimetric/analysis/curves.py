"""Scores over growing shifts: one number per method, the change against the mean, and whether the structure of a space predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from unimetric.errors import UnimetricError


def change_against_mean(scores: Float[np.ndarray, "M S"]) -> Float[np.ndarray, "M S"]:
    """What each method gains or loses against the mean over all methods on the same split (Milbich et al. 2021, fig. 2).

    Args:
        scores: one row a method, one column a split.

    >>> change_against_mean(np.array([[0.8, 0.5], [0.6, 0.5]])).round(3).tolist()
    [[0.1, 0.0], [-0.1, 0.0]]
    """
    return scores - scores.mean(0)


class Trend(NamedTuple):
    """A line through the points of all methods and splits.

    Args:
        slope: of the least-squares line.
        correlation: Pearson's, from -1 to 1; near 0 where the structure foretells nothing.
    """

    slope: float
    correlation: float


def structure_trend(structure: Float[np.ndarray, "M S"], scores: Float[np.ndarray, "M S"]) -> Trend:
    """Whether a property of the training embeddings goes along with generalisation (Milbich et al. 2021, sec. 4.3 and fig. 4).

        x = (property - min) / (max - min),  y = (score - min) / (max - min),  over the methods of each split;  then one line through all

    A split in which all methods are alike says nothing, and is left out.

    Args:
        structure: such as spectral decay or the ratio of distances within and between classes, of each method (row) on each split (column).
        scores: such as recall@1, of the same.
    """
    kept = (np.ptp(structure, 0) > 0) & (np.ptp(scores, 0) > 0)
    if not kept.any():
        raise UnimetricError(
            "no split has two methods that differ, so there is no trend", "compare two methods at least on the same splits"
        )
    x, y = (((values - values.min(0)) / np.where(kept, np.ptp(values, 0), 1))[:, kept].ravel() for values in (structure, scores))
    x, y = x - x.mean(), y - y.mean()
    return Trend(float(x @ y / (x @ x)), float(x @ y / np.sqrt((x @ x) * (y @ y))))


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
