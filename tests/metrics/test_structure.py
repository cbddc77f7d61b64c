"""Distances and spectra: the definition as a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.metrics import Space, measure


def value(space: Space, text: str) -> float:
    return measure(space, [text])[text]


def cosine_distance(x, y) -> float:
    return 1 - float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def naive_intra(points, labels, fill) -> float:
    means, alone = [], 0
    for label in np.unique(labels):
        rows = points[labels == label]
        pairs = [cosine_distance(x, y) for i, x in enumerate(rows) for j, y in enumerate(rows) if i != j]
        if pairs:
            means.append(sum(pairs) / len(pairs))
        else:
            alone += 1
    if fill:
        means += [max(means)] * alone
    return sum(means) / len(means)


def naive_inter(points, labels) -> float:
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    centres = [unit[labels == label].mean(0) for label in np.unique(labels)]
    pairs = [cosine_distance(x, y) for i, x in enumerate(centres) for j, y in enumerate(centres) if i != j]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("geometry", ["cosine", "euclidean"])
def test_distances_within_and_between_classes(crowd, geometry):
    embeddings, labels = crowd()
    labels[:2] = torch.tensor([70, 71])
    points, classes = embeddings.numpy(), labels.numpy()
    space = Space(embeddings, labels, geometry=geometry)
    for fill in (False, True):
        intra = naive_intra(points, classes, fill)
        assert math.isclose(value(space, f"pi_intra(fill_singletons={fill})"), intra, rel_tol=1e-9)
        assert math.isclose(value(space, f"pi_ratio(fill_singletons={fill})"), intra / naive_inter(points, classes), rel_tol=1e-9)
    assert math.isclose(value(space, "pi_inter"), naive_inter(points, classes), rel_tol=1e-9)


def test_one_class_and_only_singletons_have_distances_of_zero():
    assert value(Space(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)), "pi_inter") == pytest.approx(0, abs=1e-12)
    assert value(Space(torch.randn(5, 3), torch.arange(5)), "pi_intra") == 0


def naive_decay(points, largest, smallest, reverse) -> float:
    values = np.linalg.svd(points, compute_uv=False)
    values = values[largest : len(values) - smallest]
    share = values / values.sum()
    if reverse:
        return sum(s * math.log(s * len(share)) for s in share)
    return sum(1 / len(share) * math.log(1 / len(share) / s) for s in share)


@pytest.mark.parametrize(("largest", "smallest", "reverse"), [(1, 0, False), (0, 0, False), (1, 1, False), (2, 0, True)])
@pytest.mark.parametrize("pictures", [200, 4])
def test_spectral_decay(crowd, largest, smallest, reverse, pictures):
    embeddings, labels = crowd(pictures=pictures, dim=6)
    text = f"spectral_decay(drop_largest={largest}, drop_smallest={smallest}, reverse={reverse})"
    expected = naive_decay(embeddings.numpy(), largest, smallest, reverse)
    for memory in (1 << 29, 1):  # one decomposition, or many on top of one another
        assert math.isclose(value(Space(embeddings, labels, geometry="euclidean", memory=memory), text), expected, rel_tol=1e-9)


def test_a_collapsed_space_decays_most():
    even, collapsed = torch.cat([torch.eye(8)] * 8), torch.ones(64, 8)
    labels = torch.arange(64)
    # With every direction alike the decay is zero, the largest being dropped or not.
    assert value(Space(even, labels), "spectral_decay") == pytest.approx(0, abs=1e-9)
    assert value(Space(collapsed, labels), "spectral_decay") > 20


def test_spectral_decay_refuses_to_drop_everything():
    with pytest.raises(UnimetricError, match="1 of 4 singular values must remain, got drop_largest=3 and drop_smallest=1"):
        value(Space(torch.eye(4), torch.arange(4)), "spectral_decay(drop_largest=3, drop_smallest=1)")


@pytest.mark.parametrize("memory", [1 << 29, 1 << 12])
@pytest.mark.parametrize("dim", [3, 30])
def test_class_spectra(crowd, dim, memory):
    embeddings, labels = crowd(pictures=70, dim=dim)
    spectra = []
    for label in np.unique(labels):
        values = np.linalg.svd(embeddings.numpy()[labels.numpy() == label], compute_uv=False)
        spectra.append(np.pad(values / values.sum(), (0, 30))[:5])
    measured = measure(Space(embeddings, labels, geometry="euclidean", memory=memory), ["class_spectra(top=5)"])
    assert list(measured) == [f"class_spectra(top=5)/{number}" for number in range(1, 6)]
    assert np.allclose(list(measured.values()), np.mean(spectra, 0), atol=1e-7)


@pytest.mark.parametrize("memory", [1 << 29, 1 << 10])
def test_uniformity(crowd, memory):
    embeddings, labels = crowd(pictures=40)
    unit = embeddings.numpy() / np.linalg.norm(embeddings.numpy(), axis=1, keepdims=True)
    pairs = [math.exp(-2 * float(((x - y) ** 2).sum())) for i, x in enumerate(unit) for j, y in enumerate(unit) if i != j]
    assert math.isclose(value(Space(embeddings, labels, memory=memory), "uniformity"), math.log(sum(pairs) / len(pairs)), rel_tol=1e-9)


def test_singular_values(crowd) -> None:
    embeddings, labels = crowd(pictures=40)
    values = torch.linalg.svdvals(embeddings.double())
    measured = measure(Space(embeddings.double(), labels, geometry="euclidean"), ["singular_values(top=5)"])
    assert list(measured) == [f"singular_values(top=5)/{number}" for number in range(1, 6)]
    assert list(measured.values()) == pytest.approx((values / values.sum())[:5].tolist())
    assert len(measure(Space(torch.eye(4), torch.arange(4) // 2), ["singular_values"])) == 4


def test_class_spectra_of_no_values_are_refused() -> None:
    with pytest.raises(UnimetricError, match="`top` must be at least 1, got 0"):
        measure(Space(torch.eye(4), torch.arange(4) // 2), ["class_spectra(top=0)"])


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner"])
@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e20])
def test_lengths_do_not_change_the_metrics_of_unit_vectors(geometry: str, scale: float) -> None:
    points, labels = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 8
    texts = ["pi_intra", "pi_inter", "uniformity"]
    scaled = Space(points * scale, labels, geometry=geometry)
    assert measure(scaled, texts) == pytest.approx(measure(Space(points, labels), texts), rel=1e-5)
