"""Metrics over neighbours: the definition as a loop, in every geometry, with every picture asking or with a query/gallery protocol."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.metrics import Space, measure


def average_precision(row: list[bool], places: int, divisor: float) -> float:
    found, total = 0, 0.0
    for place, match in enumerate(row[:places], 1):
        found += match
        total += match * found / place
    return total / divisor


NAIVE = {
    "recall": lambda row, own: any(row[:1]),
    "recall(k=4)": lambda row, own: any(row[:4]),
    "recall(k=1000)": lambda row, own: any(row),
    "precision(k=5)": lambda row, own: sum(row[:5]) / 5,
    "precision(k=1000)": lambda row, own: sum(row) / 1000,
    "r_precision": lambda row, own: sum(row[: sum(row)]) / sum(row),
    "r_precision(count_query=True)": lambda row, own: sum(row[: sum(row) + own]) / (sum(row) + own),
    "map_at_r": lambda row, own: average_precision(row, sum(row), sum(row)),
    "map_at_r(count_query=True)": lambda row, own: average_precision(row, sum(row) + own, sum(row) + own),
    "map_at_k(k=6)": lambda row, own: average_precision(row, 6, min(6, sum(row))),
    "map_at_k(k=6, divide='class')": lambda row, own: average_precision(row, 6, sum(row) + own),
    "map_at_k(k=6, divide='found')": lambda row, own: average_precision(row, 6, max(1, sum(row[:6]))),
    "map_at_k(k=6, divide='relevant')": lambda row, own: average_precision(row, 6, sum(row)),
    "map_at_k(class_size=True, divide='class')": lambda row, own: average_precision(row, sum(row) + own, sum(row) + own),
    "map_at_k": lambda row, own: average_precision(row, 1000, sum(row)),
    "map_at_k(k=None)": lambda row, own: average_precision(row, len(row), sum(row)),
    "mrr": lambda row, own: 1 / (row.index(True) + 1),
    "mrr(k=None)": lambda row, own: 1 / (row.index(True) + 1),
    "mrr(k=2)": lambda row, own: 1 / (row.index(True) + 1) if row.index(True) < 2 else 0,
}


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner", "poincare"])
@pytest.mark.parametrize("protocol", ["everyone", "query and gallery"])
def test_definition(crowd, naive, geometry, protocol):
    embeddings, labels = crowd()
    labels[0] = 99  # alone in its class: nobody can find it, and it can find nobody
    everyone = np.ones(len(labels), bool)
    query = everyone if protocol == "everyone" else np.arange(len(labels)) % 3 == 0
    gallery = everyone if protocol == "everyone" else ~query
    rows = naive(embeddings.numpy(), labels.numpy(), query, gallery, geometry)
    space = Space(embeddings, labels, query, gallery, geometry=geometry)
    assert space.queries - space.unmatched == len(rows) < space.queries
    measured = measure(space, list(NAIVE))
    for text, formula in NAIVE.items():
        expected = sum(formula(row, int(protocol == "everyone")) for row in rows) / len(rows)
        assert math.isclose(measured[text], expected, rel_tol=1e-9), text
        assert math.isclose(measure(Space(embeddings, labels, query, gallery, geometry=geometry), [text])[text], expected, rel_tol=1e-9)


def test_map_at_k_refuses_an_unknown_divisor(crowd):
    with pytest.raises(UnimetricError, match="possible"):
        measure(Space(*crowd()), ["map_at_k(divide='posible')"])
