import numpy as np
import pytest

from unimetric.analysis.swapping import ClassShift, plateau_of, removed, scripted_removal, swapped


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


def length(x):
    return float(np.sqrt((np.asarray(x) ** 2).sum()))


def centers(means, train, test):
    return sum(means[c] for c in train) / len(train), sum(means[c] for c in test) / len(test)


@pytest.mark.parametrize("seed", range(5))
def test_removal_follows_the_text(seed):
    """Classes go that are closest to the mean of the other side, as long as half of the images are left."""
    shift, start = world(seed)
    last = [*swapped(shift, start, count=20, plateau=True)][-1]
    steps = [*removed(shift, last)]
    train, test = list(last.train), list(last.test)
    for number, step in enumerate(steps, 1):
        mu_train, mu_test = centers(shift.means, train, test)
        near_test = sorted(train, key=lambda c: length(shift.means[c] - mu_test))[:2]
        near_train = sorted(test, key=lambda c: length(shift.means[c] - mu_train))[:2]
        train, test = [c for c in train if c not in near_test], [c for c in test if c not in near_train]
        assert step.train.tolist() == train and step.test.tolist() == test and step.key == f"R{2 * number}"
        assert step.share == shift.images[train + test].sum() / shift.images.sum() >= 0.5
    assert steps[-1].distance > 1.2 * last.distance
    mu_train, mu_test = centers(shift.means, train, test)
    gone = sorted(train, key=lambda c: length(shift.means[c] - mu_test))[:2]
    gone += sorted(test, key=lambda c: length(shift.means[c] - mu_train))[:2]
    left = [c for c in train + test if c not in gone]
    assert shift.images[left].sum() < 0.5 * shift.images.sum()  # one more step would be too many


def test_text_and_script_remove_different_classes():
    """Train class 1 is closest to the test mean; train class 2 has the least difference of both distances."""
    means = np.array([[-13.0, -6.0], [6.0, 0.0], [7.0, 6.0], [9.0, 0.0], [10.0, 0.0], [11.0, 0.0]])
    shift = ClassShift(means, np.full(6, 10))
    start = shift.measure("0", np.arange(3), np.arange(3, 6))
    mu_train, mu_test = centers(means, range(3), range(3, 6))
    assert (mu_train == 0).all() and (mu_test == [10, 0]).all()
    assert length(means[1] - mu_test) < length(means[2] - mu_test)
    assert length(means[2] - mu_test) - length(means[2]) < length(means[1] - mu_test) - length(means[1])
    (text,) = [step for step in removed(shift, start, classes=1, least=0.6)]
    assert text.train.tolist() == [0, 2] and text.test.tolist() == [4, 5]
    script = next(scripted_removal(shift, start, classes=1))
    assert script.train.tolist() == ([0, 1] if script.key == "R1" else [0, 1, 3])


def naive_script(shift, start, steps, history=5):
    """The authors' removal, one class after another: swap; if that does not lower the distance, delete instead."""
    train, test, distance, past_train, past_test, kinds = list(start.train), list(start.test), start.distance, [], [], ""
    for _ in range(steps):
        mu_train, mu_test = centers(shift.means, train, test)

        def gap(c, other, own):
            return length(shift.means[c] - other) - length(shift.means[c] - own)

        by_train = sorted(range(len(train)), key=lambda i: gap(train[i], mu_test, mu_train))
        by_test = sorted(range(len(test)), key=lambda i: gap(test[i], mu_train, mu_test))
        swapped_train, swapped_test, chosen_train, chosen_test = list(train), list(test), [], []
        for k in range(2):
            i = next(position for position in by_train[k:] if position not in past_train[-history:])
            j = next(position for position in by_test[k:] if position not in past_test[-history:])
            past_train.append(i)
            past_test.append(j)
            chosen_train.append(i)
            chosen_test.append(j)
            swapped_train[i], swapped_test[j] = swapped_test[j], swapped_train[i]
        after = shift.measure("", np.array(swapped_train), np.array(swapped_test)).distance
        kinds += "s" if after < distance else "R"
        if after < distance:
            train, test = swapped_train, swapped_test
        else:
            train = [c for position, c in enumerate(train) if position not in chosen_train]
            test = [c for position, c in enumerate(test) if position not in chosen_test]
        distance = shift.measure("", np.array(train), np.array(test)).distance
    return train, test, kinds


def test_script_swaps_or_removes():
    seen = set()
    for seed in range(4):
        shift, start = world(seed)
        last = [*swapped(shift, start, count=20)][-1]
        steps = [*scripted_removal(shift, last, count=20)]
        train, test, kinds = naive_script(shift, last, 20)
        assert steps[-1].train.tolist() == train and steps[-1].test.tolist() == test
        assert "".join("s" if "s" in step.key else "R" for step in steps) == kinds
        assert steps[-1].key.startswith(f"R{30 - len(train)}") and len(steps) == 20
        seen |= set(kinds)
    assert seen == {"s", "R"}  # both cases occur


def test_the_same_world_gives_the_same_splits():
    first, second = ([*swapped(*world(2), count=8)] for _ in range(2))
    assert [step.train.tolist() for step in first] == [step.train.tolist() for step in second]


def test_more_places_to_pass_over_than_there_are():
    shift, start = world(classes=8)
    assert len([*swapped(shift, start, count=20, history=30)]) < 19
