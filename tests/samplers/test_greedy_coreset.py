import numpy as np
import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.samplers.greedy_coreset import centers_by_product, centers_by_table
from unimetric.spec import create


def naive_centres(points, count):
    chosen = [0]
    while len(chosen) < count:
        best, far = None, -1.0
        for x in range(len(points)):
            near = min(sum((a - b) ** 2 for a, b in zip(points[x], points[c], strict=True)) for c in chosen)
            if x not in chosen and near > far + 1e-12:
                best, far = x, near
        chosen.append(best)
    return chosen


def sphere(rows, dim, seed=0):
    points = np.random.default_rng(seed).standard_normal((rows, dim))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.mark.parametrize("centres", [centers_by_table, centers_by_product])
def test_equals_textbook_greedy_k_centre(centres):
    for seed in range(3):
        points = sphere(40, 5, seed)
        assert centres(torch.from_numpy(points), 12).tolist() == naive_centres(points.tolist(), 12)


@pytest.mark.parametrize("centres", [centers_by_table, centers_by_product])
def test_duplicates_come_last_and_no_point_twice(centres):
    points = torch.from_numpy(np.concatenate([sphere(6, 3)] * 2)).float()
    chosen = centres(points, 12).tolist()
    assert sorted(chosen) == list(range(12))
    assert sorted(position % 6 for position in chosen[:6]) == list(range(6))


def test_the_batch_is_the_centres_of_the_big_batch_each_with_its_class():
    labels = np.random.default_rng(0).integers(25, size=300)
    points = sphere(300, 6)
    for n in (1, 2, 3):
        sampler = create("samplers", f"greedy_coreset(n={n}, big_batch=60)", labels=labels, batch_size=24, seed=4)
        sampler.fill(torch.from_numpy(5 * points))  # of any length: they are put on the sphere
        for step in range(3):
            rows = sampler.batch(step)
            big = np.random.default_rng((4, 0, step)).choice(300, 60, replace=False)
            assert rows[::n].tolist() == big[naive_centres(points[big].tolist(), 24 // n)].tolist()
            assert (labels[rows].reshape(-1, n) == labels[rows[::n]][:, None]).all()
            assert len(set(rows)) == 24


def test_mates_repeat_only_where_a_class_has_no_more():
    labels = np.array([0] * 2 + [1] * 3 + [2] * 40)
    sampler = create("samplers", "greedy_coreset(n=4)", labels=labels, batch_size=24, seed=0)
    two = sampler._add_class_mates(np.array([0, 1, 2, 10, 11, 12]), np.random.default_rng(0), np.arange(6)).reshape(6, 4)
    assert (labels[two] == labels[two[:, :1]]).all()
    assert set(two[2]) == {2, 3, 4}
    assert len(set(two[3:].ravel())) == 12


def test_centres_cover_the_big_batch_better_than_chance():
    labels, points = np.arange(500), sphere(500, 4)
    sampler = create("samplers", "greedy_coreset(n=1)", labels=labels, batch_size=30, seed=0)
    sampler.fill(torch.from_numpy(points))
    rng = np.random.default_rng(1)

    def reach(rows):
        return (2 - 2 * points @ points[rows].T).min(1).max()

    assert reach(sampler.batch(0)) < min(reach(rng.choice(500, 30, replace=False)) for _ in range(50))


def test_a_big_batch_smaller_than_the_centres_is_refused():
    with pytest.raises(UnimetricError, match="big_batch=10"):
        create("samplers", "greedy_coreset(big_batch=10)", labels=np.arange(100), batch_size=24, seed=0)
