import itertools

import numpy as np
import pytest

from unimetric.analysis.swapping import ClassShift, plateau_of, removed, swapped


def world(seed=0, classes=60, dim=12):
    """Classes around a few centres, as species around families; any class may be on either side."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((6, dim))[rng.integers(6, size=classes)] * 3 + rng.standard_normal((classes, dim))
    shift = ClassShift(means, rng.integers(20, 60, size=classes))
    order = rng.permutation(classes)
    return shift, shift.measure("0", np.sort(order[: classes // 2]), np.sort(order[classes // 2 :]))


def naive_swaps(means, train, test, swaps, steps, history):
    """The authors' rule, one class after another."""
    train, test, past_train, past_test = list(train), list(test), [], []
    for _ in range(steps):
        mu_train = sum(means[c] for c in train) / len(train)
        mu_test = sum(means[c] for c in test) / len(test)

        def gap(c, other, own):
            return np.sqrt(((means[c] - other) ** 2).sum()) - np.sqrt(((means[c] - own) ** 2).sum())

        by_train = sorted(range(len(train)), key=lambda i: gap(train[i], mu_test, mu_train))
        by_test = sorted(range(len(test)), key=lambda i: gap(test[i], mu_train, mu_test))
        for k in range(swaps):
            i = next(place for place in by_train[k:] if place not in past_train[-history:])
            j = next(place for place in by_test[k:] if place not in past_test[-history:])
            train[i], test[j] = test[j], train[i]
            past_train.append(i)
            past_test.append(j)
    return train, test


@pytest.mark.parametrize("seed", range(3))
def test_the_rule_slowly(seed):
    shift, start = world(seed)
    steps = list(swapped(shift, start, swaps=2, count=9))
    assert [step.key for step in steps] == ["2", "4", "6", "8", "10", "12", "14", "16"]
    train, test = naive_swaps(shift.means, start.train, start.test, 2, 8, 5)
    assert steps[-1].train.tolist() == train and steps[-1].test.tolist() == test


@pytest.mark.parametrize("seed", range(5))
def test_classes_stay_disjoint_sizes_balanced_and_it_grows_harder_up_to_a_plateau(seed):
    shift, start = world(seed)
    hard = [start, *swapped(shift, start, count=20)]
    for step in hard:
        assert sorted([*step.train, *step.test]) == list(range(60))
        assert len(step.train) == len(step.test) == 30 and step.share == 1
    distances = [step.distance for step in hard]
    end = plateau_of(distances)
    assert (np.diff(distances[: end + 1]) > 0).all()
    # The plateau is where the climb ends, and not its first stumble.
    assert end >= 3 and distances[end] > 0.85 * max(distances) and distances[end] > 2 * distances[0]
    stopped = [start, *swapped(shift, start, count=20, plateau=True)]
    assert [step.distance for step in stopped] == distances[: end + 1]


def test_the_other_way_is_easier():
    shift, start = world()
    far = [*swapped(shift, start, count=12)][-1]
    easy = [*swapped(shift, far, count=10, history=8, reverse=True)]
    assert easy[0].key == "-2" and min(step.distance for step in easy) < 0.6 * far.distance


@pytest.mark.parametrize("seed", range(5))
def test_removal_leaves_half_of_the_pictures_and_grows_harder(seed):
    shift, start = world(seed)
    last = [*swapped(shift, start, count=20, plateau=True)][-1]
    steps = [*removed(shift, last)]
    assert [step.key for step in steps][:3] == ["R2", "R4", "R6"]
    for before, step in zip([last, *steps], steps, strict=False):
        assert not set(step.train) & set(step.test) and len(step.train) == len(step.test)
        assert set(step.train) < set(before.train) and set(step.test) < set(before.test)
        assert step.distance > before.distance and 0.5 <= step.share < before.share
        # What went was nearest to the other mean: no class that stayed was nearer.
        gone = [np.flatnonzero(before.train == c)[0] for c in set(before.train) - set(step.train)]
        assert set(gone) == set(shift.order(before.train, before.test)[0][:2])
    nearly = steps[-1]
    left = shift.order(nearly.train, nearly.test)
    rest = np.concatenate([np.delete(nearly.train, left[0][:2]), np.delete(nearly.test, left[1][:2])])
    assert shift.images[rest].sum() < 0.5 * shift.images.sum()  # one step more would have been too many


def test_the_script_keeps_an_exchange_that_lowers_the_distance():
    shift, start = world(3)
    steps = [*removed(shift, [*swapped(shift, start, count=20)][-1], code_removal=True, count=12)]
    sizes = [len(step.train) for step in steps]
    assert len(steps) <= 12 and sizes == sorted(sizes, reverse=True)
    for before, step in itertools.pairwise(steps):
        if "s" in step.key:
            assert len(step.train) == len(before.train) and step.distance < before.distance
        else:
            assert len(step.train) == len(before.train) - 2
    assert all(len(step.train) == len(step.test) and not set(step.train) & set(step.test) for step in steps)


def naive_script(shift, train, test, distance, steps):
    """The authors' removal, one step after another: exchange; where that does not lower the distance, delete instead."""
    train, test = list(train), list(test)
    for _ in range(steps):
        first, second = (list(order[:2]) for order in shift.order(np.array(train), np.array(test)))
        tried, other = list(train), list(test)
        for i, j in zip(first, second, strict=True):
            tried[i], other[j] = test[j], train[i]
        after = shift.measure("", np.array(tried), np.array(other)).distance
        if after < distance:
            train, test, distance = tried, other, after
            continue
        train = [c for place, c in enumerate(train) if place not in first]
        test = [c for place, c in enumerate(test) if place not in second]
        distance = shift.measure("", np.array(train), np.array(test)).distance
    return train, test


@pytest.mark.parametrize("seed", range(3))
def test_the_script_counts_its_steps_and_not_the_pictures(seed):
    shift, start = world(seed)
    last = [*swapped(shift, start, count=20)][-1]
    steps = [*removed(shift, last, code_removal=True, count=24)]
    assert len(steps) == 24 and steps[-1].share < 0.5
    train, test = naive_script(shift, last.train, last.test, last.distance, 24)
    assert steps[-1].train.tolist() == train and steps[-1].test.tolist() == test


def test_the_same_world_gives_the_same_splits():
    first, second = ([*swapped(*world(2), count=8)] for _ in range(2))
    assert [step.train.tolist() for step in first] == [step.train.tolist() for step in second]


def test_more_places_to_pass_over_than_there_are():
    shift, start = world(classes=8)
    assert len([*swapped(shift, start, count=20, history=30)]) < 19
