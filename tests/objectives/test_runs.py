"""Whole runs with each objective: what is left at test time, and that a broken run ends as the unbroken one."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig, from_settings, load
from unimetric.errors import Interrupted, UnimetricError
from unimetric.runs.model import build_model
from unimetric.samplers.samples_per_class import SamplesPerClass
from unimetric.training.loop import train

#: Each with its counters turning over within a few steps.
OBJECTIVES = {
    "s2sd(dims=(12, 16), delay=4, pool_aggr=True)": "linear(dim=8)",
    "uniform_prior(every=3, lr=1e-3)": "linear(dim=8)",
    "mixup": "linear(dim=8)",
    "diva(queue=50, temperature=0.5)": "diva(dim=8)",
}


def settings(letters: Path, objective: str, **others: object) -> RunConfig:
    return load(
        **{
            "dataset": f"pack(path='{letters}')",
            "transform": "glyphs(size=32)",
            "backbone": "small(channels=16)",
            "head": OBJECTIVES.get(objective, "linear(dim=8)"),
            "objective": objective,
            "batch_size": 12,
            "optimizer": "adam(lr=1e-3)",
            "epochs": 3,
            "evaluate_every": 0,
            "logger": "none",
            "device": "cpu",
        }
        | others
    )


class Killed(Exception):
    pass


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_broken_twice_ends_as_the_unbroken_one(objective: str, letters: Path, tmp_path: Path, monkeypatch) -> None:
    """Asked to stop inside the second epoch, then struck down inside the third: not a bit differs, nor is the model another one."""
    config = settings(letters, objective)
    train(config, tmp_path / "unbroken", quiet=True)
    draw = SamplesPerClass.batch

    def ask(self, step: int) -> np.ndarray:
        if (self.epoch, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self, step)

    def strike(self, step: int) -> np.ndarray:
        if (self.epoch, step) == (2, 1):
            raise Killed
        return draw(self, step)

    monkeypatch.setattr(SamplesPerClass, "batch", ask)
    with pytest.raises(Interrupted, match="epoch 2 after step"):
        train(config, tmp_path / "broken", quiet=True)
    monkeypatch.setattr(SamplesPerClass, "batch", strike)
    with pytest.raises(Killed):
        train(config, tmp_path / "broken", quiet=True)
    monkeypatch.undo()
    train(config, tmp_path / "broken", quiet=True)
    one, two = (load_file(tmp_path / run / "checkpoint.safetensors") for run in ("unbroken", "broken"))
    assert one.keys() == two.keys()
    assert [key for key in one if not torch.equal(one[key], two[key])] == []
    plain = build_model(from_settings(asdict(config) | {"objective": "plain"}))
    kept = load_file(tmp_path / "unbroken" / "model.safetensors")
    assert {key: value.shape for key, value in kept.items()} == {key: value.shape for key, value in plain.state_dict().items()}
    evaluate(tmp_path / "unbroken", save=tmp_path / "embeddings.npz")
    assert np.load(tmp_path / "embeddings.npz")["embeddings"].shape[1] == (32 if objective.startswith("diva") else 8)


def test_diva_asks_for_its_head_before_anything_is_read(letters: Path, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="four equal branches"):
        train(settings(letters, "diva"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
