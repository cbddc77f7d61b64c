import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import create


def build(labels, batch_size):
    return create("samplers", "class_random", labels=np.asarray(labels), batch_size=batch_size, seed=0)


def test_random_rows_and_a_mate_for_one_of_them():
    labels = np.random.default_rng(0).integers(60, size=600)
    sampler = build(labels, 20)
    drawn = np.stack(list(sampler))
    assert drawn.shape == (30, 20)
    first = drawn[:, :-1].ravel()
    assert len(set(first)) == len(first)
    for rows in drawn:
        assert labels[rows[-1]] in labels[rows[:-1]]
        assert rows[-1] not in rows[:-1]
    assert len({len(set(labels[rows])) for rows in drawn}) > 1


def test_samples_not_classes_are_equally_likely():
    labels = np.repeat([0, 1, 2, 3], [900, 40, 30, 30])
    sampler, share = build(labels, 50), []
    for epoch in range(10):
        sampler.epoch = epoch
        share.extend((labels[rows[:-1]] == 0).mean() for rows in sampler)
    assert abs(np.mean(share) - 0.9) < 0.01


def test_only_one_class_has_a_mate():
    labels = np.array([*range(30), 29])
    sampler = build(labels, 31)
    for epoch in range(20):
        sampler.epoch = epoch
        rows = sampler.batch(0)
        missing = set(range(31)) - set(rows[:-1])
        assert rows[-1] in missing if missing & {29, 30} else rows[-1] in rows[:-1]


def test_a_batch_of_one_is_refused():
    with pytest.raises(UnimetricError, match="`batch_size` must be at least 2, got 1"):
        build([0, 0, 1], 1)
