"""Verification, open sets and clusters of unknown number: each definition as a loop, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, roc_auc_score

from unimetric.errors import UnimetricError
from unimetric.geometry import pair_scores
from unimetric.geometry.pair_scores import PairScores
from unimetric.metrics import Space, interval, measure


def score_slowly(geometry, x, y, c=0.1):
    if geometry == "cosine":
        return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    if geometry == "inner":
        return float(x @ y)
    square = ((x - y) ** 2).sum()
    if geometry == "euclidean":
        return -float(np.sqrt(square))
    return -float(np.arccosh(1 + 2 * c * square / (1 - c * x @ x) / (1 - c * y @ y)) / np.sqrt(c))


def pairs_slowly(points, labels, query, gallery, group, geometry="cosine"):
    """(score, genuine) of every pair that counts."""
    found = []
    for q in np.flatnonzero(query):
        for g in np.flatnonzero(gallery):
            if q != g and not (labels[q] == labels[g] and group[q] == group[g] >= 0):
                found.append((score_slowly(geometry, points[q], points[g]), labels[q] == labels[g]))
    return np.array(found)


def verify_slowly(pairs, far):
    """(threshold, true accept rate, equal error rate) by trying every score as a threshold."""
    genuine, impostor = pairs[pairs[:, 1] == 1, 0], pairs[pairs[:, 1] == 0, 0]
    tried = [(t, (impostor > t).mean(), (genuine <= t).mean()) for t in sorted(set(pairs[:, 0]))]
    threshold = min(t for t, fmr, _ in tried if fmr <= far and t in set(impostor))
    return threshold, (genuine > threshold).mean(), min(max(fmr, fnmr) for _, fmr, fnmr in tried)


@pytest.fixture
def scene(crowd):
    points, labels = crowd(pictures=90, classes=9, spread=0.5)
    group = np.random.default_rng(2).integers(-1, 3, 90)
    query = np.arange(90) % 3 == 0
    gallery = ~query & (labels.numpy() < 6)
    return points, labels, query, gallery, group


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner", "poincare"])
@pytest.mark.parametrize("far", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("memory", [1 << 14, 1 << 29])
def test_verification_equals_a_loop_over_pairs(scene, geometry, far, memory):
    points, labels, query, gallery, group = scene
    pairs = pairs_slowly(points.numpy(), labels.numpy(), query, gallery, group, geometry)
    threshold, tar, eer = verify_slowly(pairs, far)
    space = Space(points, labels, query, gallery, group=group, geometry=geometry, memory=memory)
    values = measure(space, [f"verification(far={far})", f"fnmr_at_fmr(fmr={far})"])
    assert list(values.values()) == pytest.approx([tar, threshold, eer, 1 - tar], rel=1e-9, abs=1e-12)
    some = PairScores(space).rates(0.3)
    genuine, impostor = pairs[pairs[:, 1] == 1, 0], pairs[pairs[:, 1] == 0, 0]
    assert (some.fmr, some.fnmr) == pytest.approx(((impostor > 0.3).mean(), (genuine <= 0.3).mean()), rel=1e-12)


def test_verification_with_few_bins_is_exact(scene, monkeypatch):
    points, labels, query, gallery, group = scene
    space = Space(points, labels, query, gallery, group=group)
    texts = ["verification(far=0.02)", "verification(far=0.3)"]
    many = measure(space, texts)
    monkeypatch.setattr(pair_scores, "_BINS", 4)
    assert measure(space, texts) == pytest.approx(many, rel=1e-12)


def test_verification_of_tied_scores():
    points = torch.eye(3, dtype=torch.float64).repeat(4, 1)
    space = Space(points, torch.arange(12) % 3)
    assert measure(space, ["verification(far=0.0)"]) == {
        "verification(far=0.0)/tar": 1.0,
        "verification(far=0.0)/threshold": 0.0,
        "verification(far=0.0)/eer": 0.0,
    }
    with pytest.raises(UnimetricError, match="no impostor pair"):
        PairScores(Space(points, torch.zeros(12, dtype=torch.int64)))


def test_bootstrap_weights_pairs_by_both_classes(scene):
    points, labels, query, gallery, group = scene
    space = Space(points, labels, query, gallery, group=group, seed=3)
    drawn = PairScores(space).resample(threshold=0.4, draws=20)
    generator = torch.Generator().manual_seed(3)
    for draw in range(20):
        weight = np.bincount(torch.randint(9, (9,), generator=generator).numpy(), minlength=9)
        false = all_ = missed = genuine = 0.0
        for q in np.flatnonzero(query):
            for g in np.flatnonzero(gallery):
                a, b = int(labels[q]), int(labels[g])
                high = score_slowly("cosine", points[q].numpy(), points[g].numpy()) > 0.4
                if a == b and group[q] == group[g] >= 0:
                    continue
                if a == b:
                    genuine, missed = genuine + weight[a], missed + weight[a] * (not high)
                else:
                    all_, false = all_ + weight[a] + weight[b] - 1, false + (weight[a] + weight[b] - 1) * high
        assert float(drawn.fmr[draw]) == pytest.approx(np.clip(false / all_, 0, 1), rel=1e-9)
        if genuine:
            assert float(drawn.fnmr[draw]) == pytest.approx(missed / genuine, rel=1e-9)


def test_bootstrap_interval_covers_the_estimate(crowd):
    points, labels = crowd(pictures=300, classes=40, dim=16)
    (tar, threshold, _, *ends) = measure(Space(points, labels), ["verification(far=0.05, level=0.95, draws=200)"]).values()
    assert ends[0] < tar < ends[1] and ends[2] < threshold < ends[3]


@pytest.mark.parametrize("classes", [7, 8])
def test_verification_interval_needs_eight_classes(crowd, classes):
    points, labels = crowd(pictures=80, classes=classes, dim=16)
    text = "verification(far=0.05, level=0.95, draws=20)"
    names = ["tar", "threshold", "eer"]
    if classes == 8:
        names += ["tar/from", "tar/to", "threshold/from", "threshold/to"]
    assert list(measure(Space(points, labels), [text])) == [f"{text}/{name}" for name in names]


def identify_slowly(points, labels, query, gallery, group):
    """(known, unknown) queries: label, label and score of the nearest, of those that count."""
    known, unknown = [], []
    for q in np.flatnonzero(query):
        others = [g for g in np.flatnonzero(gallery) if g != q]
        allowed = [g for g in others if not (labels[q] == labels[g] and group[q] == group[g] >= 0)]
        score, best = max((score_slowly("cosine", points[q], points[g]), -g) for g in allowed)
        row = (labels[q], labels[-best], score)
        if any(labels[g] == labels[q] for g in allowed):
            known.append(row)
        elif not any(labels[g] == labels[q] for g in others):
            unknown.append(row)
    return known, unknown


def balanced(rows):
    classes = {label for label, _ in rows}
    return np.mean([np.mean([right for label, right in rows if label == one]) for one in classes])


def test_open_set_metrics_equal_their_definitions(scene, monkeypatch):
    points, labels, query, gallery, group = scene
    known, unknown = identify_slowly(points.numpy(), labels.numpy(), query, gallery, group)
    assert len(known) > 5 and len(unknown) > 5
    space = Space(points, labels, query, gallery, group=group)
    assert len(space.unknown) == len(unknown) and len(space.unknown) + len(space.lost) == space.unmatched
    scores = sorted((score for *_, score in unknown), reverse=True)
    allowed = int(0.2 * len(scores))
    expected = {
        "fpir(threshold=0.8)": np.mean([score > 0.8 for *_, score in unknown]),
        "fnir(threshold=0.8)": np.mean([not (a == b and score > 0.8) for a, b, score in known]),
        "fnir(fpir=0.2)": np.mean([not (a == b and score > scores[allowed]) for a, b, score in known]),
        "baks(threshold=0.8)": balanced([(a, a == b and score > 0.8) for a, b, score in known]),
        "baus(threshold=0.8)": balanced([(a, score <= 0.8) for a, _, score in unknown]),
        "auroc": roc_auc_score([1] * len(known) + [0] * len(unknown), [score for *_, score in known + unknown]),
    }
    assert measure(space, list(expected)) == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr("unimetric.metrics._measure.FEWEST", 5)  # the known queries have five classes
    low, high = interval(space, "baks(threshold=0.8)")
    assert low <= expected["baks(threshold=0.8)"] <= high


def test_open_set_metrics_need_unknown_queries(crowd):
    space = Space(*crowd())
    for text in ("fpir", "fnir", "auroc", "baus"):
        with pytest.raises(UnimetricError, match="whose class is not in the gallery") as error:
            measure(space, ["recall(k=1)", text])
        assert error.value.message.startswith(f"`{text}`: ")
    with pytest.raises(UnimetricError, match=r"^`baus`: .* whose class is not in the gallery"):
        interval(space, "baus")


def components_slowly(points, threshold):
    cluster = list(range(len(points)))
    for i in range(len(points)):
        for j in range(i):
            if score_slowly("cosine", points[i], points[j]) > threshold and cluster[i] != cluster[j]:
                cluster = [cluster[i] if number == cluster[j] else number for number in cluster]
    return cluster


@pytest.mark.parametrize("threshold", [-1.0, 0.5, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("memory", [1 << 15, 1 << 29])
def test_ari_equals_scikit_learns_of_linked_images(crowd, threshold, memory):
    points, labels = crowd(pictures=80)
    expected = adjusted_rand_score(labels, components_slowly(points.numpy(), threshold))
    assert measure(Space(points, labels, memory=memory), [f"ari(threshold={threshold})"]) == {
        f"ari(threshold={threshold})": pytest.approx(expected, abs=1e-9)
    }


def test_rates_of_float32_scores_at_any_threshold(crowd):
    points, labels = crowd(pictures=60, classes=4)
    space = Space(points.float(), labels)
    pairs = PairScores(space)
    score = (space.points @ space.points.T).double().fill_diagonal_(-2)
    impostor = score[space.labels[:, None] != space.labels]
    for threshold in [0.1, 0.25, 1 / 3, float(impostor[7]), float(impostor.max()), -3.0, 3.0]:
        expected = float((impostor > threshold).double().mean())
        assert pairs.rates(threshold).fmr == pytest.approx(expected, abs=1e-12)
    assert pairs.threshold(0.0) == float(impostor.max()) and pairs.threshold(1.0) == -torch.inf


@pytest.mark.parametrize("geometry", ["cosine", "euclidean"])
@pytest.mark.parametrize("metric", ["verification", "fnmr_at_fmr", "auroc"])
def test_spaces_without_pairs_are_rejected(geometry: str, metric: str) -> None:
    points, labels, none = torch.randn(6, 2), torch.arange(6) % 2, torch.zeros(6, dtype=torch.bool)
    roles = ({"query": none}, {"gallery": none}, {"group": torch.zeros(6, dtype=torch.int64), "group_rule": "group"})
    for options in roles:
        with pytest.raises(UnimetricError, match="gallery"):
            measure(Space(points, labels, geometry=geometry, **options), [metric])
