"""What the definitions are held against: neighbours found one pair at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch


def distance(x: list[float], y: list[float], geometry: str, curvature: float = 0.1) -> float:
    """Between two points, from the definition of each geometry."""
    if geometry == "cosine":
        dot = sum(a * b for a, b in zip(x, y, strict=True))
        return 1 - dot / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    if geometry == "inner":
        return -sum(a * b for a, b in zip(x, y, strict=True))
    if geometry == "euclidean":
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))
    # Moebius addition of -x and y, as Ganea et al. 2018 and Ermolov et al. 2022 write it.
    xy, xx, yy = -sum(a * b for a, b in zip(x, y, strict=True)), sum(a * a for a in x), sum(b * b for b in y)
    c, below = curvature, 1 + 2 * curvature * xy + curvature**2 * xx * yy
    added = [((1 + 2 * c * xy + c * yy) * -a + (1 - c * xx) * b) / below for a, b in zip(x, y, strict=True)]
    return 2 / math.sqrt(c) * math.atanh(math.sqrt(c) * math.sqrt(sum(a * a for a in added)))


def rank(embeddings: np.ndarray, labels: np.ndarray, query: np.ndarray, gallery: np.ndarray, geometry: str) -> list[list[bool]]:
    """For every query that has a match: whether its neighbours match, nearest first, equals by index, itself left out."""
    rows = []
    points = embeddings.tolist()
    for i in np.flatnonzero(query):
        others = [j for j in np.flatnonzero(gallery) if j != i]
        others.sort(key=lambda j: (distance(points[i], points[j], geometry), j))
        if any(labels[j] == labels[i] for j in others):
            rows.append([bool(labels[j] == labels[i]) for j in others])
    return rows


@pytest.fixture
def naive() -> Callable[..., list[list[bool]]]:
    return rank


@pytest.fixture
def crowd() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Classes of uneven size around centres of their own, float64, within the unit ball."""

    def make(pictures: int = 60, classes: int = 7, dim: int = 5, seed: int = 0, spread: float = 0.8) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, classes, pictures)
        points = rng.normal(size=(classes, dim))[labels] + spread * rng.normal(size=(pictures, dim))
        points /= 1.1 * np.linalg.norm(points, axis=1).max()
        return torch.from_numpy(points), torch.from_numpy(labels)

    return make
