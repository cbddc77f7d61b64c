"""Batches by source: whose rows are in a batch, in which proportions, and how often."""

import numpy as np
import pytest

from unimetric.config import from_settings
from unimetric.errors import UnimetricError
from unimetric.samplers.by_source import BySource, apportion
from unimetric.training.loop import train

#: Three datasets with 60, 240 and 20 rows, as in a union, and categories inside one of them.
SHOP = [f"shop/{kind}/{i}" for kind in ("chair", "lamp") for i in range(12)]
NAMES = [*(f"birds/{i}" for i in range(6)), *SHOP, *(f"pets/{i}" for i in range(4))]
SIZES = [10] * 6 + [10] * 24 + [5] * 4
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(34), SIZES))
SOURCE = np.array([["birds", "shop", "pets"].index(NAMES[label].split("/")[0]) for label in LABELS])


def build(**arguments):
    return BySource(labels=LABELS, class_names=NAMES, batch_size=16, **arguments)


def rows_of(sampler, epochs):
    for epoch in range(epochs):
        sampler.epoch = epoch
        yield from sampler


def test_a_batch_has_one_source_and_pairs_of_classes():
    for rows in rows_of(build(), 3):
        assert len(set(SOURCE[rows])) == 1
        classes = LABELS[rows].reshape(8, 2)
        assert (classes[:, 0] == classes[:, 1]).all()
        expected = min(8, len(set(LABELS[SOURCE[rows[0]] == SOURCE])))
        assert len(set(classes[:, 0])) == expected  # as many classes as the source has


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [("equal", [1, 1, 1]), ("proportional", [60, 240, 20]), ("power", [60**0.5, 240**0.5, 20**0.5])],
)
def test_sources_have_their_weights(weights, expected, mixed):
    rows = np.concatenate(list(rows_of(build(weights=weights, mixed=mixed), 200)))
    found = np.bincount(SOURCE[rows]) / len(rows)
    assert found == pytest.approx(np.array(expected) / np.sum(expected), abs=0.01)


def test_mixed_batches_have_every_source():
    for rows in rows_of(build(mixed=True), 3):
        assert sorted(np.bincount(SOURCE[rows], minlength=3) // 2) in ([2, 3, 3], [2, 2, 4])


@pytest.mark.parametrize("weights", ["equal", "proportional", "power"])
def test_mixed_batches_repeat_no_class(weights):
    sampler = build(mixed=True, weights=weights)
    for rows in rows_of(sampler, 20):
        assert len(set(LABELS[rows])) == 8 and len(set(rows)) == 16
    visits = np.bincount(LABELS[sampler.plan()[:, ::2].ravel()], minlength=34)
    for source in ("birds", "shop", "pets"):
        assert np.ptp([visits[label] for label, name in enumerate(NAMES) if name.startswith(source)]) <= 1


def test_level_divides_a_dataset_into_categories():
    sampler = build(level=2)
    assert sorted(len(rows) for rows in sampler.rows) == [20, 60, 120, 120]
    for rows in rows_of(sampler, 2):
        assert len({"/".join(NAMES[label].split("/")[:-1]) for label in LABELS[rows]}) == 1


def test_rows_of_a_source_come_equally_often():
    """Within an epoch, no row of the shop comes twice before all have come."""
    rows = np.concatenate(list(build(weights="proportional")))
    shop = rows[SOURCE[rows] == 1]
    assert np.bincount(shop, minlength=len(LABELS))[SOURCE == 1].max() <= 2
    assert not np.array_equal(rows, np.concatenate(list(build(weights="proportional", seed=1))))


def test_quotas_are_rounded_without_bias():
    rng = np.random.default_rng(0)
    counts = np.array([np.bincount(apportion(np.array([0.55, 0.45]), 3, rng), minlength=2) for _ in range(4000)])
    assert set(counts[:, 0]) == {1, 2}
    assert counts.mean(0) == pytest.approx([1.65, 1.35], abs=0.03)


def test_a_run_over_a_union(config, tmp_path):
    union = f"union(parts=[{config.dataset!r}, \"glyphs(blocks='shapes')\"])"
    settings = vars(config) | {"dataset": union, "sampler": "by_source(mixed=True)", "epochs": 1, "evaluate_every": 0}
    assert train(from_settings(settings), tmp_path / "run", quiet=True)["epoch"] == 1


def test_warns_about_a_source_without_negatives(caplog):
    arguments = {"labels": np.repeat(np.arange(3), 8), "class_names": ["cups/red", "cups/blue", "jugs/all"], "batch_size": 8}
    BySource(**arguments, mixed=True)
    assert not caplog.text
    BySource(**arguments)
    assert "1 of 2 sources have one class, such as `jugs/all`" in caplog.text and "mixed=True" in caplog.text


@pytest.mark.parametrize("labels", [np.array([0, 0, -1, -1]), np.array([0, 0, 2, 2])])
def test_labels_without_a_name_are_rejected(labels):
    """A negative label would count from the end."""
    with pytest.raises(UnimetricError, match=r"`labels` must be from 0 to 1, got (-1 to 0|0 to 2)"):
        BySource(labels=labels, batch_size=2, class_names=("a/x", "b/y"))
