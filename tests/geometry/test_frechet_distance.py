import numpy as np
import pytest
import scipy.linalg
import torch

from unimetric.errors import UnimetricError
from unimetric.geometry.frechet import class_means, frechet_distance


def cloud(points, dim, rank=None, seed=0):
    """Points with directions of very different spread, off the origin; in a subspace where a rank is given."""
    rng = np.random.default_rng(seed)
    inner = rng.standard_normal((points, rank or dim)) * np.geomspace(1, 0.05, rank or dim)
    return (inner @ rng.standard_normal((rank, dim)) if rank else inner) + rng.standard_normal(dim)


def naive(a, b):
    """The formula by scipy's roots of matrices, in its symmetric form: tr (S S*)^(1/2) = tr (R S* R)^(1/2), R = S^(1/2)."""
    own, other = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(own).real
    inner = scipy.linalg.sqrtm(root @ other @ root).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(own) + np.trace(other) - 2 * np.trace(inner)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((60, 9), (80, 9)),  # many points: the eigenproblem
        ((7, 24), (9, 24)),  # few points: the small cross product; both covariances singular
        ((7, 24), (200, 24)),  # one of them singular
        ((90, 24, 5), (120, 24)),  # many points in a subspace: singular, and no Cholesky factor
        ((120, 24), (90, 24, 5)),
        ((90, 24, 6), (120, 24, 3)),
    ],
)
def test_equals_scipys_formula(first, second):
    a, b = cloud(*first), cloud(*second, seed=1)
    found = float(frechet_distance(torch.from_numpy(a), torch.from_numpy(b)))
    assert found == pytest.approx(naive(a, b), rel=1e-8)
    assert float(frechet_distance(torch.from_numpy(b), torch.from_numpy(a))) == pytest.approx(found, rel=1e-9)


def test_the_two_ways_agree_and_neither_changes_when_dimensions_are_added():
    a, b = cloud(30, 29), cloud(30, 29, seed=1)
    many = float(frechet_distance(torch.from_numpy(a), torch.from_numpy(b)))  # 900 > 29 * 29: eigenproblem
    wide = [torch.from_numpy(np.pad(points, ((0, 0), (0, 3)))) for points in (a, b)]
    assert float(frechet_distance(*wide)) == pytest.approx(many, rel=1e-9)


def test_one_pair_or_a_grid_of_them():
    a = torch.stack([torch.from_numpy(cloud(12, 5, seed=seed)) for seed in range(6)]).view(2, 3, 12, 5)
    b = torch.stack([torch.from_numpy(cloud(15, 5, seed=seed)) for seed in range(6, 12)]).view(2, 3, 15, 5)
    each = torch.stack([frechet_distance(x, y) for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)])
    assert torch.allclose(frechet_distance(a, b).flatten(), each, rtol=1e-10)


def test_no_distance_from_itself_and_a_shift_counts_squared():
    points = torch.from_numpy(cloud(10, 40)).float()  # float32 comes in, float64 works
    found = frechet_distance(points, points.double() + 2)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(4 * 40, rel=1e-9)
    assert abs(float(frechet_distance(points, points))) < 1e-9


def test_one_point_is_no_gaussian():
    with pytest.raises(UnimetricError, match="at least 2 points, got 1"):
        frechet_distance(torch.zeros(1, 3), torch.zeros(4, 3))


def test_class_means():
    features, labels = torch.tensor([[1.0, 2], [3, 4], [5, 9]]), torch.tensor([1, 1, 0])
    assert class_means(features, labels, 2).tolist() == [[5, 9], [2, 3]]
    with pytest.raises(UnimetricError, match="class 2 has none"):
        class_means(features, labels, 3)
