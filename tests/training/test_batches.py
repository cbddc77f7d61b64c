"""Batches of an epoch, the meter of its loss, and the state of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unimetric.config import RunConfig, from_settings
from unimetric.errors import UnimetricError
from unimetric.runs.device import open_fabric
from unimetric.runs.display import Display
from unimetric.training import state as states
from unimetric.training.batches import batches, in_groups
from unimetric.training.progress import Meter, Progress
from unimetric.training.state import TrainingState, build_training_state


def built(config: RunConfig, **settings: object) -> TrainingState:
    config = from_settings(asdict(config) | settings)
    return build_training_state(config, open_fabric(config), Display(quiet=True))


def test_in_groups_rejects_leftover_items() -> None:
    assert list(in_groups(range(4), 2)) == [(0, 1), (2, 3)]
    with pytest.raises(ValueError, match="groups of 2, got 1 leftover"):
        list(in_groups(range(5), 2))


def test_batches_start_at_any_step(config: RunConfig) -> None:
    state = built(config)
    state.begin_epoch(2)
    whole = dict(batches(state, 2))
    rest = dict(batches(state, 2, start=3))
    assert list(whole) == list(range(state.steps)) and list(rest) == list(range(3, state.steps))
    for step, batch in rest.items():
        assert np.array_equal(batch.rows, whole[step].rows) and torch.equal(batch.images, whole[step].images)
        assert batch.labels.tolist() == state.labels[batch.rows].tolist()


def test_batches_crop_repeated_images_differently(config: RunConfig) -> None:
    state = built(config)
    state.sampler = SimpleNamespace(batch=lambda step: np.zeros(4, np.int64))
    state.__class__ = type("Short", (TrainingState,), {"steps": 1})
    ((_, batch),) = batches(state, 0)
    assert len({image.numpy().tobytes() for image in batch.images}) == 4


def test_state_builds_each_component_once(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("build_model", "build_objective", "build_optimizer", "create"):
        original = getattr(states, name)

        def counted(*arguments: object, original: object = original, name: str = name, **options: object) -> object:
            calls.append(name if name != "create" else str(arguments[0]))
            return original(*arguments, **options)  # type: ignore[operator]

        monkeypatch.setattr(states, name, counted)
    built(config)
    assert sorted(calls) == ["build_model", "build_objective", "build_optimizer", "samplers", "transforms"]


def test_progress_keeps_the_first_best_epoch(config: RunConfig) -> None:
    state = SimpleNamespace(config=config, chosen_on="test", test_score={})
    progress = Progress()
    scores = [0.5, float("nan"), 0.5, 0.7]
    lines = [{"epoch": epoch, "test/recall(k=1)": score, "test a/recall(k=1)": -score} for epoch, score in enumerate(scores)]
    assert [progress.record(line, state) for line in lines] == [True, False, False, True]  # type: ignore[arg-type]
    result = progress.result(state, {})  # type: ignore[arg-type]
    assert (result["epoch"], result["chosen_on"], result["variants"]["a"]["epoch"]) == (3, "test", 0)
    assert Progress(**progress.notes()) == progress


def test_meter_continues_the_sum_of_a_resumed_epoch(tmp_path: Path) -> None:
    state = SimpleNamespace(
        config=SimpleNamespace(batch_size=8),
        fabric=SimpleNamespace(device=torch.device("cpu")),
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}]),
        steps=4,
    )
    meter = Meter(state, Progress(epoch=1, step=2, loss=3.0), 1, tmp_path)  # type: ignore[arg-type]
    for _ in range(2):
        meter.add(torch.tensor(2.5), {"a": torch.tensor(1.0), "b": torch.tensor(1.5)})
    line = meter.line()
    assert (line["epoch"], line["loss"], line["term/b"], line["lr"]) == (2, 2.0, 1.5, 0.5)
    assert meter.note().startswith("loss 2.0000  ")
    meter.add(torch.tensor(float("inf")), {})
    with pytest.raises(UnimetricError, match="not finite in epoch 2"):
        meter.total()
