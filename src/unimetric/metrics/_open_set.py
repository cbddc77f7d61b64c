"""Queries of known and of unknown classes, shared by the metrics of open sets."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.geometry.space import Average, Space


def find_unknown(space: Space) -> Int[Tensor, "U"]:
    """Return the queries of classes outside the gallery, or raise an error without any."""
    unknown = space.unknown
    if not len(unknown):
        raise UnimetricError(
            f"an open set needs queries whose class is not in the gallery, got none among {space.queries} queries",
            "use `split = 'open_set'`, or remove some classes from the gallery",
        )
    return unknown


def find_known(space: Space) -> Int[Tensor, "K"]:
    """Return the queries with a match, or raise an error if there are none."""
    if not len(space.matched):
        raise UnimetricError(f"an open set needs queries with a match in the gallery, got none among {space.queries} queries", "add some")
    return space.matched


def threshold_at(scores: Float[Tensor, "U"], rate: float) -> float:
    """Return the lowest score that at most this fraction of the scores exceeds.

    Returns -inf if all scores may exceed it.
    """
    allowed = int(rate * len(scores) * (1 + 1e-12))
    if allowed >= len(scores):
        return -torch.inf
    return float(scores.sort(descending=True).values[allowed])


def average_classes(space: Space, queries: Int[Tensor, "M"], each: Tensor) -> Average:
    """Return the mean over classes of the mean over their queries."""
    labels, inverse = torch.unique(space.labels[space.query[queries]], return_inverse=True)
    total = torch.zeros(len(labels), dtype=torch.float64, device=space.device).index_add_(0, inverse, each.to(torch.float64))
    return Average(total / torch.bincount(inverse), labels)
