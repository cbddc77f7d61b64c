"""Few pictures a training class, and the same test classes."""

from __future__ import annotations

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.spec import bind
from unimetric.splits.few_shot import few_shot
from unimetric.splits.standard import standard

LABELS = np.repeat(np.arange(6), [5, 2, 9, 4, 4, 4])[np.random.default_rng(0).permutation(28)]


def table() -> Table:
    return Table(paths=tuple(map(str, range(28))), labels=LABELS, class_names=tuple("abcdef"), train=LABELS < 3, source_names=("made up",))


@pytest.mark.parametrize("shots", [1, 2, 4, 8])
def test_every_training_class_has_as_many(shots: int) -> None:
    split = few_shot(table(), shots=shots)
    classes, counts = np.unique(LABELS[split.train], return_counts=True)
    assert classes.tolist() == [0, 1, 2]
    assert counts.tolist() == [shots] * 3
    for label, size in enumerate([5, 2, 9]):
        assert len(set(split.train[LABELS[split.train] == label])) == min(shots, size)
    assert split.test.tolist() == standard(table()).test.tolist()
    assert split.name == f"few_shot({shots})"


def test_fewer_shots_are_among_more_and_the_seed_decides() -> None:
    few, more = (few_shot(table(), shots=shots, seed=3).train for shots in (2, 4))
    assert set(few) <= set(more)
    assert not np.array_equal(few, few_shot(table(), shots=2, seed=4).train)
    assert np.array_equal(few, few_shot(table(), shots=2, seed=3).train)


def test_held_out_classes_keep_all_their_pictures() -> None:
    labels = np.repeat(np.arange(8), 5)
    many = Table(paths=tuple(map(str, range(40))), labels=labels, class_names=tuple("abcdefgh"), train=labels < 6, source_names=("m",))
    split = few_shot(many, shots=1, validation=0.4)
    assert len(split.validation) == 10
    assert len(split.train) == 4
    assert not set(labels[split.train]) & set(labels[split.validation])


def test_no_shot_is_refused() -> None:
    with pytest.raises(UnimetricError, match="shots"):
        few_shot(table(), shots=0)
    assert bind("splits", "few_shot(shots=4)")[1] == {"shots": 4}
