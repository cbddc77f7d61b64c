from itertools import combinations
from math import sqrt

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from unimetric.errors import UnimetricError
from unimetric.samplers._histograms import count_by_comparison, count_by_table, pair_histograms
from unimetric.spec import create


def naive_distances(points):
    return [sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True))) for x, y in combinations(points.tolist(), 2)]


def naive_histogram(distances, low, high, bins):
    counts = np.zeros(bins)
    for distance in distances:
        counts[min(int((distance - low) / (high - low) * bins), bins - 1)] += 1
    return counts / counts.sum()


def case(seed, rows=90, dim=6, candidates=7, size=20):
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((rows, dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points, np.stack([rng.choice(rows, size, replace=False) for _ in range(candidates)])


def build(options="", **given):
    given = {"labels": np.repeat(np.arange(40), 8), "batch_size": 20, "seed": 2} | given
    return create("samplers", f"distance_matching({options})", **given)


@pytest.mark.parametrize("bins", [1, 7, 50])
@pytest.mark.parametrize("rows", [20, 21, 90])
def test_cost_equals_scipys_distance_of_the_histograms(bins, rows):
    points, positions = case(rows, rows=rows)
    own = naive_distances(points)
    low, high = min(own), max(own)
    middle = low + (np.arange(bins) + 0.5) * (high - low) / bins
    whole = naive_histogram(own, low, high, bins)
    expected = [
        wasserstein_distance(middle, middle, naive_histogram(naive_distances(points[candidate]), low, high, bins), whole)
        for candidate in positions
    ]
    cost = build(f"bins={bins}").cost(torch.from_numpy(points), torch.from_numpy(positions))
    assert np.allclose(cost, expected, rtol=1e-9, atol=1e-15)


def test_code_cost_equals_the_authors_formula():
    points, positions = case(1)
    own = naive_distances(points)
    whole = naive_histogram(own, min(own), max(own), 50)
    expected = []
    for candidate in positions:
        part = naive_histogram(naive_distances(points[candidate]), min(own), max(own), 50)
        mean = points[candidate].mean(0) - points.mean(0)
        deviation = points[candidate].std(0) - points.std(0)
        wasserstein = wasserstein_distance(part, whole) + wasserstein_distance(whole, part)
        expected.append(np.linalg.norm(mean) + np.linalg.norm(deviation) + 75 * wasserstein)
    cost = build("code_cost=True").cost(torch.from_numpy(points), torch.from_numpy(positions))
    assert np.allclose(cost, expected, rtol=1e-9)


@pytest.mark.parametrize("options", ["", ", code_cost=True"])
def test_the_chosen_candidate_is_the_arg_min(options):
    points, _ = case(3, rows=320)
    sampler = build("big_batch=100" + options)
    sampler.fill(torch.from_numpy(points))
    for step in range(4):
        rows, positions = sampler.candidates.draw(0, step)
        assert rows.shape == (100,) and positions.shape == (10, 20)
        cost = sampler.cost(torch.from_numpy(points[rows]), torch.from_numpy(positions))
        assert sampler.batch(step).tolist() == rows[positions[int(cost.argmin())]].tolist()
        assert len(set(cost.tolist())) > 1


def test_counting_by_comparison_equals_counting_by_table():
    rng = np.random.default_rng(0)
    for shape in ((1000, 1), (1001, 1), (33, 6)):
        bins = torch.from_numpy(rng.integers(64, size=shape, dtype=np.uint8))
        expected = np.stack([np.bincount(column, minlength=64) for column in bins.numpy().T])
        assert (count_by_comparison(bins).numpy() == expected).all()
        assert (count_by_table(bins).numpy() == expected).all()


def test_a_repeated_row_is_no_pair_with_itself():
    points, positions = case(5)
    positions[0, 1] = positions[0, 0]
    _, parts, _ = pair_histograms(torch.from_numpy(points), torch.from_numpy(positions), bins=10)
    own = naive_distances(points)
    subset = points[positions[0]]
    pairs = [distance for distance in naive_distances(subset) if distance > 0]
    assert np.allclose(parts[0], naive_histogram(pairs, min(own), max(own), 10))


def test_a_collapsed_network_still_gives_batches():
    sampler = build()
    sampler.fill(torch.ones(320, 5))
    assert sampler.batch(0).shape == (20,)


def test_draws_have_n_of_each_class():
    labels = np.random.default_rng(0).integers(30, size=400)
    sampler = build("n=4, big_batch=200", labels=labels, batch_size=40)
    for step in range(5):
        rows, positions = sampler.candidates.draw(3, step)
        assert len(set(rows)) == len(rows) == 200
        for candidate in positions:
            classes = labels[rows[candidate]].reshape(-1, 4)
            assert (classes == classes[:, :1]).all() and len(set(classes[:, 0])) == 10
            assert len(set(candidate)) == 40
        assert len({tuple(sorted(candidate)) for candidate in positions}) == 10


@pytest.mark.parametrize(
    ("options", "word"), [("bins=0", "bins=0"), ("candidates=0", "candidates=0"), ("big_batch=10", "big_batch=10"), ("n=3", "n=3")]
)
def test_what_makes_no_sense_is_refused(options, word):
    with pytest.raises(UnimetricError, match=word):
        build(options)
