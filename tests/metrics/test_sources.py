"""Several datasets in one space."""

from __future__ import annotations

import pytest
import torch

from unimetric.metrics import Space, measure


def test_each_dataset_alone_and_all_in_one_gallery(crowd):
    parts = [crowd(seed=seed, spread=spread) for seed, spread in ((1, 0.5), (2, 1.0), (3, 1.5))]
    embeddings, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))  # the same labels in each: they must not match
    source = torch.arange(3).repeat_interleave(60)
    space = Space(embeddings, labels, source=source, source_names=("birds", "cars", "shoes"))
    alone = [measure(Space(*part), ["recall(k=2)", "nmi"]) for part in parts]
    measured = measure(space, ["per_source(metric='recall(k=2)')", "per_source(metric='nmi')", "harmonic(metric='recall(k=2)')", "unified"])
    for name, expected in zip(space.source_names, alone, strict=True):
        assert measured[f"per_source(metric='recall(k=2)')/{name}"] == expected["recall(k=2)"]
        assert measured[f"per_source(metric='nmi')/{name}"] == pytest.approx(expected["nmi"], rel=1e-12)
    assert measured["harmonic(metric='recall(k=2)')"] == pytest.approx(
        3 / sum(1 / expected["recall(k=2)"] for expected in alone), rel=1e-12
    )
    distinct = Space(embeddings, labels + 100 * source)
    assert measured["unified"] == measure(distinct, ["recall"])["recall"]
    assert measured["unified"] < min(expected["recall(k=2)"] for expected in alone)


def test_a_dataset_that_asks_nothing_is_left_out(crowd):
    embeddings, labels = crowd()
    source = (torch.arange(60) >= 40).long()
    measured = measure(Space(embeddings, labels, query=source == 0, source=source), ["per_source", "harmonic"])
    assert set(measured) == {"per_source/0", "harmonic"}
    assert measured["harmonic"] == pytest.approx(measured["per_source/0"])


def test_a_dataset_that_finds_nothing_makes_the_harmonic_mean_zero():
    embeddings = torch.eye(6)[[0, 0, 1, 2]]
    space = Space(embeddings, torch.tensor([0, 0, 1, 1]), source=torch.tensor([0, 0, 1, 1]))
    assert measure(space, ["harmonic"])["harmonic"] == 1.0
    blind = Space(torch.eye(6)[[0, 0, 1, 2, 1, 2]], torch.tensor([0, 0, 1, 1, 2, 2]), source=torch.tensor([0, 0, 1, 1, 1, 1]))
    assert measure(blind, ["harmonic"])["harmonic"] == 0.0
