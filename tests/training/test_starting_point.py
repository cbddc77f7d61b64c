"""The raw backbone is measured before training, and a run says so if training did not help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import read_log

from unimetric import load
from unimetric.analysis.ensemble import ensemble
from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.images.loading import View, open_pictures
from unimetric.metrics import Space, map_at_r
from unimetric.runs.device import open_fabric
from unimetric.runs.display import Display
from unimetric.runs.rows import read_table
from unimetric.runs.weights import read_tensors
from unimetric.spec import create
from unimetric.training.loop import train
from unimetric.training.state import build_training_state, embed_with_features


def _features(config: RunConfig, rows: np.ndarray) -> torch.Tensor:
    """The features of the backbone of some settings, computed without the training code."""
    torch.manual_seed(config.seed)
    backbone = create("backbones", config.backbone).eval()
    table, _ = read_table(config)
    loader = open_pictures(table, device=torch.device("cpu"), mean=backbone.mean, std=backbone.std, residence="host", workers=0)
    [images] = loader.load([(rows, View(create("transforms", config.transform)))])
    with torch.inference_mode():
        return backbone(images)[:, 0]


@pytest.mark.parametrize("settings", [{}, {"backbone": "timm(name='vit_tiny_patch16_224', image_size=32)", "adapter": "vpt(length=4)"}])
def test_raw_backbone_has_its_own_features(settings: dict[str, str], config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, epochs=1, metrics=("map_at_r",), **settings)
    best = train(config, tmp_path / "run", quiet=True)
    table, split = read_table(config)
    value = map_at_r(Space(_features(config, split.test), torch.from_numpy(table.labels[split.test])))
    assert best["raw"]["test/map_at_r"] == pytest.approx(value, abs=1e-4)
    first = read_log(tmp_path / "run")[0]
    assert first["raw"] == best["raw"]
    assert abs(value - first["test/map_at_r"]) > 1e-3, "the head's random projection is another space"


def test_measuring_the_raw_backbone_changes_no_weight(config: RunConfig, tmp_path: Path) -> None:
    train(replace(config, epochs=1, evaluate_every=1), tmp_path / "a", quiet=True)
    train(replace(config, epochs=1, evaluate_every=0), tmp_path / "b", quiet=True)
    assert "raw" not in json.loads((tmp_path / "b" / "done").read_text())
    first, second = (read_tensors(tmp_path / name / "checkpoint.safetensors")[0] for name in "ab")
    assert all(torch.equal(first[key], second[key]) for key in second)


def test_untrained_model_may_be_the_best(config: RunConfig, tmp_path: Path) -> None:
    """A learning rate that destroys the network: the untrained weights are kept, and a sentence says so."""
    config = replace(config, optimizer="sgd(lr=1e4)", epochs=2)
    best = train(config, tmp_path / "run", quiet=True)
    lines = read_log(tmp_path / "run")
    assert max(line["test/recall(k=1)"] for line in lines[1:]) < lines[0]["test/recall(k=1)"]
    assert best["epoch"] == 0 and best["warning"].startswith("training did not help: the best epoch is 0, before the first step")
    assert evaluate(tmp_path / "run")["recall(k=1)"] == pytest.approx(lines[0]["test/recall(k=1)"])


def test_interrupted_run_keeps_the_raw_values(config: RunConfig, tmp_path: Path) -> None:
    whole = train(config, tmp_path / "whole", quiet=True)
    train(replace(config, epochs=1), tmp_path / "part", quiet=True)
    (tmp_path / "part" / "done").unlink()
    (tmp_path / "part" / "config.toml").write_text(config.dump())
    assert train(config, tmp_path / "part", quiet=True)["raw"] == whole["raw"]


def test_metrics_of_the_training_images(config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, epochs=1, metrics=("recall(k=1)", "train: spectral_decay", "train: recall(k=1)"))
    train(config, tmp_path / "run", quiet=True)
    last = read_log(tmp_path / "run")[-1]
    assert {"test/recall(k=1)", "train/spectral_decay", "train/recall(k=1)"} <= set(last)
    assert "test/spectral_decay" not in last
    measured = evaluate(tmp_path / "run", part="train")
    best = json.loads((tmp_path / "run" / "done").read_text())
    assert measured == pytest.approx({"spectral_decay": best["train/spectral_decay"], "recall(k=1)": best["train/recall(k=1)"]})
    assert set(evaluate(tmp_path / "run")) == {"recall(k=1)"}


def test_repeated_training_images_do_not_match_themselves(config: RunConfig, tmp_path: Path) -> None:
    settings = {"split": "few_shot(shots=40)", "metrics": ("recall(k=1)", "train: recall(k=1)")}
    best = train(replace(config, epochs=1, **settings), tmp_path / "run", quiet=True)
    expected = pytest.approx({"recall(k=1)": best["train/recall(k=1)"]})
    assert best["train/recall(k=1)"] < 1
    assert evaluate(tmp_path / "run", part="train", metrics=["recall(k=1)"]) == expected
    assert ensemble([tmp_path / "run"], part="train", metrics=["recall(k=1)"]) == expected


def test_training_images_cannot_select_the_epoch() -> None:
    with pytest.raises(UnimetricError, match="measured on the training images"):
        load(metrics=["train: recall(k=1)", "recall(k=1)"])
    with pytest.raises(UnimetricError, match="did you mean `spectral_decay`"):
        load(metrics=["recall(k=1)", "train: spectral"])


def test_crops_of_the_raw_backbone_are_those_of_the_model(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, backbone="timm(name='test_vit', image_size=32)", adapter="vpt(length=4)", device="cpu", precision="bf16-mixed")
    state = build_training_state(config, open_fabric(config), Display(quiet=True))
    rounded, crop = [], state.loader.cropper.crop
    monkeypatch.setattr(state.loader.cropper, "crop", lambda *given: (rounded.append(torch.is_autocast_enabled("cpu")), crop(*given))[1])
    embed_with_features(state, state.split.test[:4])
    assert rounded == [False, False]


def test_raw_backbone_initializes_no_other_devices(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, backbone="timm(name='test_vit', image_size=32)", adapter="vpt(length=4)", device="cpu")
    state = build_training_state(config, open_fabric(config), Display(quiet=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail(f"a run on a CPU initializes CUDA device {device}"))
    before = torch.get_rng_state()
    embed_with_features(state, state.split.test[:4])
    assert torch.equal(torch.get_rng_state(), before)
