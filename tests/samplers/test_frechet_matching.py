import numpy as np
import scipy.linalg
import torch

from unimetric.spec import create


def naive(points, other):
    own, whole = np.cov(points, rowvar=False), np.cov(other, rowvar=False)
    root = scipy.linalg.sqrtm(own @ whole).real
    return ((points.mean(0) - other.mean(0)) ** 2).sum() + np.trace(own + whole - 2 * root)


def sphere(rows, dim):
    points = np.random.default_rng(0).standard_normal((rows, dim)) * np.arange(1, dim + 1)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def test_the_chosen_candidate_is_the_arg_min_of_scipys_formula():
    points = sphere(320, 12)
    labels = np.repeat(np.arange(40), 8)
    sampler = create("samplers", "frechet_matching(big_batch=200)", labels=labels, batch_size=20, seed=2)
    sampler.fill(torch.from_numpy(points))
    for step in range(4):
        rows, positions = sampler.candidates.draw(0, step)
        expected = [naive(points[rows][candidate], points[rows]) for candidate in positions]
        cost = sampler.cost(torch.from_numpy(points[rows]), torch.from_numpy(positions))
        assert np.allclose(cost, expected, rtol=1e-9)
        assert sampler.batch(step).tolist() == rows[positions[int(np.argmin(expected))]].tolist()


def test_fewer_points_than_dimensions():
    points = sphere(100, 30)
    positions = np.stack([np.arange(start, start + 16) for start in range(0, 80, 16)])
    sampler = create("samplers", "frechet_matching", labels=np.arange(100), batch_size=16, seed=0)
    cost = sampler.cost(torch.from_numpy(points), torch.from_numpy(positions))
    # scipy's root of a singular matrix is good to the root of its precision.
    assert np.allclose(cost, [naive(points[candidate], points) for candidate in positions], rtol=1e-6)
