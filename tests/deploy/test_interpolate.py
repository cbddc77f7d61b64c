"""Weights between start and end: the line itself, the choice on validation classes, and what is rejected."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.config import RunConfig, from_settings, load
from unimetric.deploy.export import export
from unimetric.deploy.interpolate import interpolate
from unimetric.errors import UnimetricError
from unimetric.runs.model import build_model
from unimetric.training.loop import train

VIT = {"backbone": "timm(name='test_vit', image_size=32)", "epochs": 1, "evaluate_every": 0}


def trained(config: RunConfig, folder: Path, **settings: object) -> tuple[Path, RunConfig]:
    run = from_settings(asdict(config) | VIT | {"split": "standard(validation=0.5)"} | settings)
    train(run, folder, quiet=True)
    return folder, run


@pytest.fixture(scope="module")
def run(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"transform": "glyphs(size=32)", "head": "linear(dim=8)", "batch_size": 12, "optimizer": "adam(lr=1e-3)"}
    config = load(dataset=f"pack(path='{letters}')", **small, logger="none", device="cpu")
    return trained(config, tmp_path_factory.mktemp("runs") / "run")[0]


def test_weights_are_on_the_line_and_open_like_a_run(run: Path, tmp_path: Path) -> None:
    settings = load(run / "config.toml")
    start, end = build_model(settings).state_dict(), load_file(run / "model.safetensors")
    found = interpolate([run], tmp_path / "between", alphas=[0.25])
    given = load_file(tmp_path / "between" / "model.safetensors")
    assert found == {"runs": [str(run)], "alpha": 0.25}
    for key, value in end.items():
        expected = 0.75 * start[key].double() + 0.25 * value.double()
        assert torch.allclose(given[key].double(), expected, rtol=1e-6, atol=1e-8), key
    for alpha, expected in ((0.0, start), (1.0, end)):
        interpolate([run], tmp_path / f"at {alpha}", alphas=[alpha])
        given = load_file(tmp_path / f"at {alpha}" / "model.safetensors")
        assert all(torch.equal(given[key], expected[key]) for key in end)
    assert evaluate(tmp_path / "at 1.0") == evaluate(run)
    assert evaluate(tmp_path / "at 0.0") == evaluate(settings)
    export(tmp_path / "between", tmp_path / "exported")
    assert evaluate(tmp_path / "exported", dataset=settings.dataset) == evaluate(tmp_path / "between")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
    with pytest.raises(UnimetricError, match="is an export"):
        interpolate([tmp_path / "exported"], tmp_path / "other", alphas=[0.5])


@pytest.mark.parametrize("adapter", ["", "lora(rank=2)"])
def test_validation_classes_choose_alpha(config: RunConfig, run: Path, tmp_path: Path, adapter: str) -> None:
    if adapter:
        run, _ = trained(config, tmp_path / "run", adapter=adapter)
    alphas = [0.0, 0.5, 1.0]
    found = interpolate([run], tmp_path / "best", alphas=alphas)
    values = {}
    for alpha in alphas:
        interpolate([run], tmp_path / f"at {alpha:g}", alphas=[alpha])
        values[alpha] = evaluate(tmp_path / f"at {alpha:g}", part="validation")["recall(k=1)"]
        assert found["validation"][f"{alpha:g}"] == {"validation/recall(k=1)": pytest.approx(values[alpha])}
    assert found["alpha"] == min(alpha for alpha in alphas if values[alpha] == max(values.values()))
    assert json.loads((tmp_path / "best" / "interpolation.json").read_text()) == found
    assert interpolate([run], tmp_path / "least", alphas=alphas, tolerance=0.99)["alpha"] == 0


def test_several_runs_are_averaged(config: RunConfig, run: Path, tmp_path: Path) -> None:
    rates = {"b": 1e-4, "c": 1e-2}
    runs = [run, *(trained(config, tmp_path / name, optimizer=f"adam(lr={rate})")[0] for name, rate in rates.items())]
    interpolate(runs, tmp_path / "soup")
    weights = [load_file(run / "model.safetensors") for run in runs]
    given = load_file(tmp_path / "soup" / "model.safetensors")
    for key in given:
        mean = sum(each[key].double() for each in weights) / 3
        assert torch.allclose(given[key].double(), mean, rtol=1e-6, atol=1e-8), key
    evaluate(tmp_path / "soup")


def test_rejects_runs_that_do_not_fit(config: RunConfig, run: Path, tmp_path: Path) -> None:
    wider, _ = trained(config, tmp_path / "wider", head="linear(dim=9)")
    with pytest.raises(UnimetricError, match=r"wider: `head = 'linear\(dim=9\)'`, but .*run has `head = 'linear\(dim=8\)'`"):
        interpolate([run, wider], tmp_path / "out")
    other, _ = trained(config, tmp_path / "other", seed=1)
    with pytest.raises(UnimetricError, match=r"other: started from other weights than .*run: `backbone"):
        interpolate([run, other], tmp_path / "out")
    with pytest.raises(UnimetricError, match="other: `seed = 1`"):
        interpolate([run, other], tmp_path / "out", alphas=[0, 1])
    plain, _ = trained(config, tmp_path / "plain", split="standard")
    with pytest.raises(UnimetricError, match="no validation classes, and test classes must not choose"):
        interpolate([plain], tmp_path / "out")
    with pytest.raises(UnimetricError, match=r"from 0 .* to 1 .*, got 1.5"):
        interpolate([run], tmp_path / "out", alphas=[1.5])
    with pytest.raises(UnimetricError, match="empty or new folder"):
        interpolate([run], run, alphas=[0.5])
    with pytest.raises(UnimetricError, match=r"not a run folder|no such file"):
        interpolate([tmp_path / "nothing"], tmp_path / "out", alphas=[0.5])
    assert not (tmp_path / "out").exists()


def test_rejects_runs_with_other_test_classes(config: RunConfig, run: Path, tmp_path: Path) -> None:
    settings = asdict(load(run / "config.toml"))
    other, moved = (Path(shutil.copytree(run, tmp_path / name)) for name in ("other", "moved"))
    plain, _ = trained(config, tmp_path / "plain", split="standard")
    with pytest.raises(UnimetricError, match=r"plain: `split = 'standard'`, but .*run has `split = 'standard\(validation=0.5\)'`"):
        interpolate([run, plain], tmp_path / "out")
    (moved / "config.toml").write_text(from_settings(settings | {"dataset": "pack(path='moved.pack')"}).dump())
    interpolate([run, moved], tmp_path / "soup")  # `data.json` has the same images
    (moved / "data.json").unlink()
    with pytest.raises(UnimetricError, match=r"moved: `dataset = .*moved\.pack.*, but"):
        interpolate([run, moved], tmp_path / "out")
    (other / "data.json").unlink()
    interpolate([run, other], tmp_path / "same")  # an earlier version has written no record


def test_unwritable_output_is_reported_before_the_work(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    alphas: list[str] = []
    with pytest.raises(UnimetricError, match=r"file/out.*: cannot be written: Not a directory"):
        interpolate([run], tmp_path / "file" / "out", alphas=[0.0, 1.0], note=alphas.append)
    assert not alphas


def test_command(run: Path, tmp_path: Path) -> None:
    words = ["interpolate", str(run), "--alphas", "0,1", "--out", str(tmp_path / "out"), "--set", "workers=0"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "alpha 0 " in result.output
    assert "chosen on validation classes" in result.output
    failed = CliRunner().invoke(app, ["interpolate", str(run), "--alpha", "1", "--alphas", "0,1", "--out", str(tmp_path / "no")])
    assert isinstance(failed.exception, UnimetricError)
