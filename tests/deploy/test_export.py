"""Exports: repeated after a kill, and without the paths of this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from unimetric.analysis.calibrate import read_calibration
from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.config import RunConfig, from_settings
from unimetric.deploy.export import export, export_as
from unimetric.errors import UnimetricError
from unimetric.runs import weights
from unimetric.runs.folder import open_run
from unimetric.training.loop import train


def _export_and_die(run: Path, out: Path) -> None:
    def save(tensors: Any, path: Path, notes: Any) -> None:
        save_file(tensors, path, notes)
        os.kill(os.getpid(), signal.SIGKILL)

    weights.save_file = save
    export(run, out)


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> Path:
    train(from_settings(asdict(config) | {"epochs": 1}), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_killed_export_can_be_repeated(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(target=_export_and_die, args=(run, out))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [name for name in os.listdir(out) if name.startswith(".model.safetensors.")]
    export(run, out)
    assert sorted(os.listdir(out)) == ["config.toml", "model.safetensors"]
    with pytest.raises(UnimetricError, match="must be an empty or new folder"):
        export(run, out)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_text("mine")
    with pytest.raises(UnimetricError, match="must be an empty or new folder"):
        export(run, other)


def test_export_has_no_absolute_path_and_loads(run: Path, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = export(run, tmp_path / "out")
    assert str(tmp_path.parent) not in (out / "config.toml").read_text()
    settings, model = open_run(out)
    assert settings.dataset == "pack(path='letters.pack')"
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(model.eval()(images)[0], open_run(run)[1].eval()(images)[0])
    expected = evaluate(run)
    assert evaluate(out, dataset=config.dataset) == expected
    monkeypatch.chdir(Path(config.dataset.split("'")[1]).parent)
    assert evaluate(out) == expected


def test_export_contains_the_calibrated_threshold(run: Path, tmp_path: Path) -> None:
    stored = {"threshold": 0.5, "fpr": 0.01, "score": "cosine", "test": {"fpr": 0.02, "fnr": 0.3}}
    (run / "calibration.json").write_text(json.dumps(stored))
    assert read_calibration(export(run, tmp_path / "out")) == stored
    (run / "calibration.json").write_text("{")
    with pytest.raises(UnimetricError, match=r"calibration.json: unreadable"):
        export(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_export_checks_its_output_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run, out = tmp_path / "no run", tmp_path / "file" / "mine.onnx"
    with pytest.raises(UnimetricError, match=r"mine\.onnx: cannot be written: Not a directory"):
        export(run, out)
    for form in ("onnx", "hub"):
        with pytest.raises(UnimetricError, match=r"mine\.onnx: cannot be written: Not a directory"):
            export_as(run, out, to=form)


def test_edited_export_is_refused(run: Path, config: RunConfig, tmp_path: Path) -> None:
    out = export(run, tmp_path / "out")
    (out / "config.toml").write_text((out / "config.toml").read_text().replace("glyphs(size=32)", "glyphs(size=28)"))
    with pytest.raises(UnimetricError, match=r"config\.toml: `transform` is 'glyphs\(size=28\)', but model\.safetensors was trained with"):
        open_run(out)


@pytest.mark.parametrize("command", ["train", "export", "bench", "report"])
def test_long_out_is_one_sentence(run: Path, grid: Path, tmp_path: Path, command: str) -> None:
    out = str(tmp_path / ("x" * 300))
    words = {"train": [str(run / "config.toml")], "export": [str(run)], "bench": [str(grid)], "report": [str(run)]}[command]
    shown = CliRunner().invoke(app, [command, *words, "--out", out + (".html" if command == "report" else "")])
    assert not isinstance(shown.exception, OSError), shown.exception
    error = shown.output + str(shown.exception)
    hint = "use another path" if command == "report" else "--out"
    assert "File name too long" in error and hint in error, error
