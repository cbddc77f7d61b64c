import numpy as np
import pytest
import scipy.linalg
import torch

from unimetric.geometry.frechet import eigenvalue_roots, frechet, frechet_of_points, gaussian, newton_schulz


def sets(points=60, dim=9, count=4, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, points, dim)) * rng.uniform(0.2, 2, (count, 1, dim)) + rng.standard_normal(dim))


def naive(points, other):
    own, whole = np.cov(points, rowvar=False), np.cov(other, rowvar=False)
    shift = ((points.mean(0) - other.mean(0)) ** 2).sum()
    return float(shift) + np.trace(own + whole - 2 * scipy.linalg.sqrtm(own @ whole).real)


def test_equals_scipys_formula():
    points, other = sets(), sets(200, count=1, seed=1)[0]
    expected = [naive(one, other) for one in points]
    assert np.allclose(frechet_of_points(points, *gaussian(other)), expected, rtol=1e-9)
    assert np.allclose(frechet(*gaussian(points), *gaussian(other)), expected, rtol=1e-9)


def test_one_set_or_a_grid_of_them():
    points, other = sets(), gaussian(sets(200, count=1, seed=1)[0])
    one_by_one = torch.stack([frechet_of_points(one, *other) for one in points])
    assert torch.allclose(frechet_of_points(points.view(2, 2, *points.shape[1:]), *other).flatten(), one_by_one, rtol=1e-12)


def test_a_gaussian_is_no_distance_from_itself_and_a_shift_counts_squared():
    points = sets(count=1)[0]
    mean, covariance = gaussian(points)
    assert abs(frechet(mean, covariance, mean, covariance)) < 1e-12
    assert torch.isclose(frechet_of_points(points + 2, mean, covariance), torch.tensor(4.0 * 9, dtype=torch.float64), rtol=1e-9)


def test_symmetric_and_blind_to_rotation():
    a, b = sets(count=2)
    turn = torch.linalg.qr(sets(9, 9, 1)[0]).Q
    there = frechet(*gaussian(a), *gaussian(b))
    assert torch.isclose(there, frechet(*gaussian(b), *gaussian(a)), rtol=1e-9)
    assert torch.isclose(there, frechet_of_points(a @ turn, *gaussian(b @ turn)), rtol=1e-9)


def test_fewer_points_than_dimensions_agree_with_the_moments():
    points, other = sets(points=5), sets(50, count=1, seed=1)[0]
    assert torch.allclose(frechet_of_points(points, *gaussian(other)), frechet(*gaussian(points), *gaussian(other)), rtol=1e-6)


@pytest.mark.parametrize("spectrum", ["flat", "decaying", "low rank", "zero"])
def test_newton_schulz_finds_the_trace_of_the_root(spectrum):
    values = {
        "flat": torch.ones(30),
        "decaying": torch.arange(1.0, 31) ** -4,
        "low rank": (torch.arange(30) < 7).double() * 3,
        "zero": torch.zeros(30),
    }[spectrum].double()
    turns = torch.linalg.qr(sets(30, 30)).Q
    matrices = turns * values @ turns.mT
    expected = torch.full((4,), values.sqrt().sum().item(), dtype=torch.float64)
    assert torch.allclose(newton_schulz(matrices), expected, rtol=1e-6, atol=1e-12)
    assert torch.allclose(eigenvalue_roots(matrices), expected, rtol=1e-6, atol=1e-12)
