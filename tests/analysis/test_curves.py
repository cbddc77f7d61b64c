import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from unimetric.analysis.curves import structure_trend
from unimetric.analysis.swapping import even_targets, nearest
from unimetric.errors import UnimetricError


def test_trend_is_a_line_through_normalised_points():
    rng = np.random.default_rng(1)
    scores = rng.random((6, 3))
    assert structure_trend(5 * scores + 2, scores) == pytest.approx((1, 1))
    assert structure_trend(-scores, scores) == pytest.approx((-1, -1))
    structure = rng.random((6, 3))
    x, y = (np.concatenate([(column - column.min()) / (column.max() - column.min()) for column in grid.T]) for grid in (structure, scores))
    assert structure_trend(structure, scores) == pytest.approx((np.polyfit(x, y, 1)[0], np.corrcoef(x, y)[0, 1]), rel=1e-9)


def test_a_split_on_which_all_are_alike_says_nothing():
    scores = np.random.default_rng(2).random((4, 3))
    structure = np.random.default_rng(3).random((4, 3))
    alike = structure.copy()
    alike[:, 1] = 0.5
    assert structure_trend(alike, scores) == pytest.approx(structure_trend(structure[:, [0, 2]], scores[:, [0, 2]]))
    with pytest.raises(UnimetricError, match="a trend requires"):
        structure_trend(np.ones((4, 3)), scores)


def test_choice():
    distances = [8.0, 1.0, 4.1, 4.0, 2.0]
    assert even_targets(distances, 4, keep=1) == pytest.approx([1, 1 + 7 / 3, 1 + 14 / 3, 8])
    assert even_targets(distances, 3, keep=4) == [1, 2, 8]  # the own split is near the easiest, which stays
    assert even_targets(distances, 1, keep=2) == [4.1]
    assert nearest(distances, even_targets(distances, 3, keep=2)) == [1, 2, 0]
    assert nearest(distances, [3.9, 4.2], keep=4) == [4, 2]
    assert nearest(distances, [3.9, 100]) == [3, 0]
    assert len(set(nearest(distances, [4, 4, 4, 4]))) == 4
    with pytest.raises(UnimetricError, match="from 1 to 5, got 6"):
        nearest(distances, even_targets(distances, 6, keep=0))


def test_chosen_splits_are_in_order():
    """Of choices that deviate as little as can be, the solver gives any: split 2 was easier than split 1, and split 5 than split 3."""
    distances = [8.6, 14.3, 32.2, 43.6, 63.3]
    assert nearest(distances, [19.16, 28.49, 52.62, 72.20, 92.48]) == [0, 1, 2, 3, 4]
    assert nearest(distances, [92.48, 19.16, 72.20, 28.49, 52.62]) == [4, 0, 3, 1, 2]
    rng = np.random.default_rng(0)
    for _ in range(50):
        distances, targets = rng.random(20), rng.random(9)
        found = distances[nearest(distances, targets)]
        assert (found[np.argsort(targets)] == np.sort(found)).all()
        cost = np.abs(targets[:, None] - distances)
        assert np.abs(targets - found).sum() == pytest.approx(cost[linear_sum_assignment(cost)].sum())
