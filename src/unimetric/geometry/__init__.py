"""Mathematics shared by losses, miners and metrics: functions of tensors, plain tuples.

One matrix, one meaning: rows are anchors, columns are references, and an entry is the cosine
similarity of unit vectors. Larger is closer. Named functions turn similarities into distances.
Shapes are static, and nothing synchronizes with the GPU.

B batch size, D dimension, R references (the batch itself, or a memory).
"""

from __future__ import annotations

from unimetric.geometry.draws import CounterRNG, draw, seed_dice, uniform
from unimetric.geometry.masks import (
    at_most_zero,
    compact_rows,
    exclusion,
    log_sum_exp,
    masked_max,
    masked_mean,
    masked_min,
)
from unimetric.geometry.pairs import Memory, Pairs, Triplets, as_indices, as_pairs, compare, match
from unimetric.geometry.poincare import poincare, poincare_mean, to_ball
from unimetric.geometry.sphere import class_cosines, cosines, distances, euclidean, gram, length, unit, upcast_half
from unimetric.geometry.triplets import BLOCK, CACHED, triplet_cosines, triplet_hinges

__all__ = [
    "BLOCK",
    "CACHED",
    "CounterRNG",
    "Memory",
    "Pairs",
    "Triplets",
    "as_indices",
    "as_pairs",
    "at_most_zero",
    "class_cosines",
    "compact_rows",
    "compare",
    "cosines",
    "distances",
    "draw",
    "euclidean",
    "exclusion",
    "gram",
    "length",
    "log_sum_exp",
    "masked_max",
    "masked_mean",
    "masked_min",
    "match",
    "poincare",
    "poincare_mean",
    "seed_dice",
    "to_ball",
    "triplet_cosines",
    "triplet_hinges",
    "uniform",
    "unit",
    "upcast_half",
]
