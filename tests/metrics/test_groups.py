"""Groups: what a query does not find, in every way of searching, and the evaluation of re-identification."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import unimetric.geometry.nearest
import unimetric.geometry.prefilter
from unimetric.errors import UnimetricError
from unimetric.geometry.barred import Barred
from unimetric.geometry.nearest import mutual, nearest
from unimetric.geometry.prefilter import prefilter_neighbors
from unimetric.geometry.rerank import reranked
from unimetric.metrics import Space, interval, measure


def evaluate_market(distance, q_pids, g_pids, q_camids, g_camids):
    """The evaluation of Market-1501 one query at a time: rank-k, AP by rectangles and AP by trapezoids.

    Written from the protocol: gallery images of the query's person and camera, and junk images (-1), are
    removed; distractors (0) stay; queries without a match are skipped.
    """
    firsts, rectangles, trapezoids = [], [], []
    for q in range(len(q_pids)):
        order = np.argsort(distance[q], kind="stable")
        junk = (g_pids[order] == -1) | ((g_pids[order] == q_pids[q]) & (g_camids[order] == q_camids[q]))
        match = (g_pids[order] == q_pids[q])[~junk]
        if not match.any():
            continue
        firsts.append(int(np.argmax(match)) + 1)
        found, rectangle, trapezoid, old_recall, old_precision = 0, 0.0, 0.0, 0.0, 1.0
        for rank, right in enumerate(match, 1):
            found += right
            recall, precision = found / match.sum(), found / rank
            rectangle += right * precision / match.sum()
            trapezoid += (recall - old_recall) * (old_precision + precision) / 2
            old_recall, old_precision = recall, precision
        rectangles.append(rectangle)
        trapezoids.append(trapezoid)
    ranks = {k: np.mean([first <= k for first in firsts]) for k in (1, 5, 10)}
    return ranks, np.mean(rectangles), np.mean(trapezoids), len(firsts)


def market(seed=0, persons=12, images=240, cameras=4):
    """Embeddings of persons in front of cameras, with junk (-1) and distractors (0)."""
    rng = np.random.default_rng(seed)
    pids = rng.integers(-1, persons + 1, images)
    camids = rng.integers(0, cameras, images)
    points = rng.normal(size=(persons + 2, 6))[pids + 1] + rng.normal(size=(cameras, 6))[camids] + rng.normal(size=(images, 6))
    query = (rng.random(images) < 0.2) & (pids > 0)
    return points, pids, camids, query


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory", [4096, 1 << 29])
def test_reid_metrics_equal_the_market_evaluation(seed, memory):
    points, pids, camids, query = market(seed)
    pids[query.nonzero()[0][0]] = 777  # the only image of a person
    distance = ((points[query][:, None] - points[~query][None]) ** 2).sum(2)
    ranks, rectangle, trapezoid, valid = evaluate_market(distance, pids[query], pids[~query], camids[query], camids[~query])
    space = Space(points, pids, query, ~query, geometry="euclidean", group=camids, junk=(-1,), distractors=(0,), memory=memory)
    texts = [*(f"cmc(k={k})" for k in ranks), "map", "map(variant='oxford')", "cmc(unmatched='miss')"]
    values = list(measure(space, texts).values())
    assert values[:5] == pytest.approx([*ranks.values(), rectangle, trapezoid], rel=1e-12)
    assert space.queries - space.unmatched == valid < space.queries
    assert values[5] == pytest.approx(ranks[1] * valid / space.queries, rel=1e-12)
    assert interval(space, "cmc(k=1)")[0] <= ranks[1] <= interval(space, "cmc(k=1)")[1]


def rank_slowly(points, labels, group, rule, query, gallery):
    """Whether each neighbor matches, nearest first, for each query with a match."""
    rows = []
    for q in np.flatnonzero(query):
        allowed = [g for g in np.flatnonzero(gallery) if g != q]
        if rule != "none":
            same = {g for g in allowed if group[g] == group[q] >= 0 and (rule == "group" or labels[g] == labels[q])}
            allowed = [g for g in allowed if g not in same]
        allowed.sort(key=lambda g, q=q: (((points[q] - points[g]) ** 2).sum(), g))
        matches = [bool(labels[g] == labels[q]) for g in allowed]
        if any(matches):
            rows.append(matches)
    return rows


def test_interval_of_cmc_counts_queries_without_a_match_as_misses() -> None:
    labels = torch.arange(60) // 3
    space = Space(torch.eye(20)[labels], labels, gallery=labels < 10)
    low, high = interval(space, "cmc(k=1, unmatched='miss')")
    assert low < 0.5 < high < 1 == measure(space, ["cmc(k=1)"])["cmc(k=1)"]


@pytest.mark.parametrize("rule", ["class", "group", "none"])
@pytest.mark.parametrize("groups", [2, 20])
@pytest.mark.parametrize("protocol", ["everyone", "query and gallery"])
def test_every_metric_leaves_out_the_group(crowd, rule, groups, protocol):
    points, labels = crowd(pictures=80)
    group = np.random.default_rng(1).integers(-1, groups, 80)
    query = np.ones(80, bool) if protocol == "everyone" else np.arange(80) % 3 == 0
    gallery = np.ones(80, bool) if protocol == "everyone" else ~query
    rows = rank_slowly(points.numpy(), labels.numpy(), group, rule, query, gallery)
    formulas = {
        "recall(k=1)": lambda row: row[0],
        "recall(k=5)": lambda row: any(row[:5]),
        "r_precision": lambda row: sum(row[: sum(row)]) / sum(row),
        "map_at_r": lambda row: sum(m * sum(row[: r + 1]) / (r + 1) for r, m in enumerate(row[: sum(row)])) / sum(row),
        "map": lambda row: sum(m * sum(row[: r + 1]) / (r + 1) for r, m in enumerate(row)) / sum(row),
        "mrr": lambda row: 1 / (row.index(True) + 1),
    }
    space = Space(points, labels, query, gallery, geometry="euclidean", group=group, group_rule=rule)
    assert len(space.matched) == len(rows)
    for text, value in measure(space, list(formulas)).items():
        assert math.isclose(value, sum(map(formulas[text], rows)) / len(rows), rel_tol=1e-9), text


def codes_of(kind, count):
    if kind == "few":
        return torch.randint(0, count // 4, (count,), generator=torch.Generator().manual_seed(1))
    return torch.arange(count) * 3 // count  # whole blocks of points that must not find each other


@pytest.mark.parametrize("kind", ["few", "many"])
def test_half_the_products_leave_out_the_same(kind):
    points = torch.randint(-2, 3, (321, 3), generator=torch.Generator().manual_seed(0)).double()
    codes, own = codes_of(kind, 321), torch.arange(321)
    score = (points @ points.T).masked_fill(codes[:, None] == codes, -torch.inf).fill_diagonal_(-torch.inf)
    order = score.sort(dim=1, descending=True, stable=True)
    for k in (1, 7, 60):
        expected = order.indices[:, :k].masked_fill(order.values[:, :k] == -torch.inf, -1)
        for memory in (1 << 14, 1 << 29):
            plain = nearest(points, points.clone(), k, own=own, barred=Barred(codes, codes), memory=memory)
            assert torch.equal(torch.cat([columns for *_, columns in plain]), expected)
        for side in (32, 128):
            halves = mutual(points, k, barred=Barred(codes, codes), side=side)
            assert torch.equal(torch.cat([columns for *_, columns in halves]), expected)


@pytest.mark.parametrize("kind", ["few", "many"])
def test_prefilter_leaves_out_the_same(kind, monkeypatch):
    dice = torch.Generator().manual_seed(0)
    centers = torch.randn(520, 64, generator=dice)[torch.randint(0, 520, (2603,), generator=dice)]
    points = torch.nn.functional.normalize(centers + torch.randn(2603, 64, generator=dice), dim=1)
    codes = codes_of(kind, 2603)
    exact = (points.double() @ points.double().T).masked_fill_(codes[:, None] == codes, -torch.inf).fill_diagonal_(-torch.inf)
    monkeypatch.setattr(unimetric.geometry.prefilter, "_ENGINE", "")
    values, _, proven = prefilter_neighbors(points, 6, barred=Barred(codes, codes), side=512)
    assert proven.float().mean() > 0.5
    assert torch.allclose(values[proven].double(), exact.topk(6).values[proven], rtol=0, atol=1e-6)
    monkeypatch.setattr(unimetric.geometry.nearest, "applies", lambda points, k, memory: True)
    monkeypatch.setattr(unimetric.geometry.nearest, "_is_mutual", lambda points, k, own, memory: len(points) == 2603)
    found = nearest(points, points, 6, own=torch.arange(2603), barred=Barred(codes, codes))
    assert torch.allclose(torch.cat([value for _, value, _ in found]).double(), exact.topk(6).values, rtol=0, atol=1e-6)


def test_reranked_neighbors_are_of_other_groups(crowd):
    points, labels = crowd(pictures=80)
    group = torch.arange(80) % 4
    space = reranked(Space(points, labels, group=group, group_rule="group"), depth=30)
    near = space.neighbors(20)
    assert (group[near] != group[:, None]).all()


def test_part_of_a_space_keeps_its_groups(crowd):
    points, labels = crowd(pictures=80)
    group, rows = torch.arange(80) % 4, torch.arange(80) % 5 != 0
    part = Space(points, labels, group=group).within(rows)
    alone = Space(points[rows], labels[rows], group=group[rows])
    assert torch.equal(part.neighbors(10), alone.neighbors(10)) and torch.equal(part.relevant, alone.relevant)


def test_error_names_queries_that_lose_every_match():
    labels = torch.arange(4).repeat_interleave(2)
    space = Space(torch.eye(8), labels, group=labels, names=[f"{row}.jpg" for row in range(8)])
    with pytest.raises(UnimetricError, match=r"8 of them lose .*`class`.*`0.jpg`, `1.jpg`, `2.jpg`"):
        measure(space, ["recall"])
    assert len(space.lost) == space.unmatched == 8
    assert measure(Space(torch.eye(8), labels, group=labels, group_rule="none"), ["recall"])["recall"] >= 0


def test_rejects_unknown_rule():
    with pytest.raises(UnimetricError, match="unknown group rule `clas`"):
        Space(torch.eye(2), torch.zeros(2, dtype=torch.int64), group_rule="clas")
