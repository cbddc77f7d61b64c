from itertools import pairwise

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.samplers import rank_slice
from unimetric.samplers._classes import balanced_groups
from unimetric.spec import create


def build(labels, *, n=2, batch_size=24, options=""):
    return create("samplers", f"samples_per_class(n={n}{options})", labels=labels, batch_size=batch_size, seed=5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_exactly_n_of_each_class_side_by_side(n):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(30), 9))
    for rows in build(labels, n=n):
        classes = labels[rows].reshape(-1, n)
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0])) == 24 // n
        assert len(set(rows)) == 24


def test_over_an_epoch_classes_and_rows_come_evenly():
    rng = np.random.default_rng(1)
    labels = rng.permutation(np.repeat(np.arange(30), rng.integers(4, 40, 30)))
    drawn = np.concatenate(list(build(labels)))
    visits = np.bincount(labels[drawn]) // 2
    assert visits.max() - visits.min() <= 1
    for number in range(30):
        times = np.bincount(drawn, minlength=len(labels))[labels == number]
        assert times.max() - times.min() <= 1


def test_pairs_of_classes_are_mixed_anew():
    """A batch's classes must not follow one order round and round: then some classes would never meet."""
    labels = np.repeat(np.arange(20), 60)
    meets = np.zeros((20, 20), int)
    for rows in build(labels):
        present = np.unique(labels[rows])
        meets[np.ix_(present, present)] += 1
    assert meets.min() > 0


def test_a_class_smaller_than_n_repeats_all_it_has():
    labels = np.array([0] * 3 + [1] * 50 + [2] * 50)
    for rows in build(labels, n=8):
        times = np.bincount(rows, minlength=len(labels))
        assert sorted(times[:3]) == [2, 3, 3]
        assert times[3:].max() == 1


def test_fewer_classes_than_a_batch_holds_come_again_with_other_samples():
    labels = np.repeat(np.arange(5), 30)
    for rows in build(labels):  # 12 times 2 samples of 5 classes
        assert len(set(rows)) == 24
        assert sorted(np.bincount(labels[rows])) == [4, 4, 4, 6, 6]


def test_as_the_authors_code_draws():
    labels = np.repeat(np.arange(40), [1] * 20 + [20] * 20)
    drawn = [rows for seed in range(30) for rows in build(labels, options=", with_replacement=True")]
    classes = [labels[rows[::2]] for rows in drawn]
    assert all((labels[rows[::2]] == labels[rows[1::2]]).all() for rows in drawn)
    assert any(len(set(one)) < 12 for one in classes)
    assert any((rows[::2] == rows[1::2]).any() for rows in drawn)
    assert set(np.concatenate(classes)) == set(range(40))


def test_ranks_keep_classes_whole():
    labels = np.repeat(np.arange(30), 9)
    rows = build(labels).batch(0)
    parts = [set(labels[rank_slice(rows, rank, 4)]) for rank in range(4)]
    assert all(len(part) == 3 for part in parts) and len(set.union(*parts)) == 12


def test_a_batch_that_n_does_not_divide_is_refused():
    with pytest.raises(UnimetricError, match="multiple of n=5 samples per class, got batch_size=112") as caught:
        build(np.arange(200), n=5, batch_size=112)
    assert "batch_size=110" in caught.value.hint
    with pytest.raises(UnimetricError, match="n=0"):
        build(np.arange(200), n=0)
    with pytest.raises(UnimetricError, match="label"):
        build(np.zeros(0, int))


@pytest.mark.parametrize(("cards", "hand"), [(1, 1), (2, 1), (5, 3), (5, 5), (7, 4), (100, 56)])
def test_hands_are_dealt_evenly_and_without_repeats(cards, hand):
    dealt = balanced_groups(cards, hand, 41, np.random.default_rng(0))
    assert all(len(set(one)) == hand for one in dealt)
    for upto in range(1, 42):
        times = np.bincount(dealt[:upto].ravel(), minlength=cards)
        assert times.max() - times.min() <= 2 if (upto * hand) % cards else times.max() == times.min()
    if cards > hand > 1:
        assert any(set(one) != set(other) for one, other in pairwise(dealt))
