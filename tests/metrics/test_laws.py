"""What must hold for any space."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unimetric.metrics import Space, measure

RETRIEVAL = ["recall(k=1)", "recall(k=3)", "precision(k=4)", "r_precision", "map_at_r", "map_at_k(k=10)", "mrr"]
STRUCTURE = ["pi_intra", "pi_inter", "spectral_decay", "uniformity", "class_spectra(top=3)"]
DISTANCES = st.sampled_from(["cosine", "euclidean", "poincare"])
GEOMETRIES = st.sampled_from(["cosine", "euclidean", "inner", "poincare"])
lawful = settings(max_examples=12, deadline=None, derandomize=True)


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    pictures, classes = int(torch.randint(6, 60, (1,), generator=dice)), int(torch.randint(1, 6, (1,), generator=dice))
    labels = torch.cat([torch.zeros(2, dtype=torch.int64), torch.randint(0, classes, (pictures - 2,), generator=dice)])
    points = torch.randn(pictures, 6, generator=dice, dtype=torch.float64) + torch.randn(6, 6, generator=dice, dtype=torch.float64)[labels]
    return points / (1.2 * points.norm(dim=1).max()), labels


def close(one: dict[str, float], other: dict[str, float]) -> bool:
    return one == pytest.approx(other, rel=1e-7, abs=1e-9)


@lawful
@given(seed=st.integers(0, 10**6), geometry=GEOMETRIES)
def test_a_rotation_changes_nothing(seed, geometry):
    points, labels = draw(seed)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    texts = RETRIEVAL + STRUCTURE
    assert close(measure(Space(points, labels, geometry=geometry), texts), measure(Space(points @ turn, labels, geometry=geometry), texts))


@lawful
@given(seed=st.integers(0, 10**6), geometry=GEOMETRIES)
def test_the_order_of_pictures_changes_nothing(seed, geometry):
    points, labels = draw(seed)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    query = torch.arange(len(points)) % 4 != 3
    texts = RETRIEVAL + STRUCTURE
    one = Space(points, labels, query, geometry=geometry)
    other = Space(points[order], labels[order], query[order], geometry=geometry)
    assert close(measure(one, texts), measure(other, texts))
    assert one.unmatched == other.unmatched


@lawful
@given(seed=st.integers(0, 10**6))
def test_the_names_of_classes_change_nothing(seed):
    points, labels = draw(seed)
    texts = [*RETRIEVAL, *STRUCTURE, "nmi", "ami", "f1"]
    assert close(measure(Space(points, labels), texts), measure(Space(points, 1000 - 7 * labels), texts))


@lawful
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 0.99), geometry=st.sampled_from(["cosine", "euclidean"]))
def test_the_scale_of_embeddings_changes_no_neighbour(seed, scale, geometry):
    points, labels = draw(seed)
    assert torch.equal(Space(points, labels, geometry=geometry).neighbors(5), Space(scale * points, labels, geometry=geometry).neighbors(5))


@lawful
@given(per_class=st.integers(2, 6), classes=st.integers(1, 6), geometry=DISTANCES)
def test_a_perfect_space_scores_one(per_class, classes, geometry):
    labels = torch.arange(classes).repeat(per_class)
    points = torch.eye(6, dtype=torch.float64)[labels] + torch.arange(len(labels), dtype=torch.float64)[:, None] * 1e-4
    texts = ["recall", f"precision(k={per_class - 1})", "r_precision", "map_at_r", "map_at_k", "mrr", "unified", "harmonic"]
    texts += [f"{name}(seeding='plusplus')" for name in ("nmi", "ami", "f1")]
    for text, value in measure(Space(points, labels, geometry=geometry), texts).items():
        assert value == pytest.approx(1.0, abs=1e-12), text


@lawful
@given(seed=st.integers(0, 10**6), geometry=DISTANCES)
def test_a_duplicate_picture_is_found_and_is_not_oneself(seed, geometry):
    points, labels = draw(seed)
    twice = Space(points.repeat(2, 1), labels.repeat(2), geometry=geometry)
    near = twice.neighbors(3)
    assert not (near == torch.arange(2 * len(points))[:, None]).any()
    assert measure(twice, ["recall"])["recall"] == 1.0


@lawful
@given(seed=st.integers(0, 10**6), memory=st.integers(10, 24))
def test_the_memory_changes_nothing(seed, memory):
    points, labels = draw(seed)
    assert close(measure(Space(points, labels), RETRIEVAL), measure(Space(points, labels, memory=1 << memory), RETRIEVAL))


@lawful
@given(seed=st.integers(0, 10**6))
def test_more_neighbours_never_recall_less(seed):
    space = Space(*draw(seed))
    values = list(measure(space, [f"recall(k={k})" for k in range(1, space.answers)]).values())
    assert values == sorted(values)
    assert values[-1] == 1.0
