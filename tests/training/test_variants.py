"""Head weights at test time: runs report all published weightings of DiVA, and an evaluation can change them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import read_log
from typer.testing import CliRunner

from unimetric.analysis.adapt import adapt
from unimetric.analysis.ensemble import ensemble
from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.config import RunConfig, from_settings, score
from unimetric.errors import UnimetricError
from unimetric.report.folders import read_runs
from unimetric.report.numbers import measured, methods
from unimetric.samplers.samples_per_class import SamplesPerClass
from unimetric.training.log import format_log_line, main_metrics, variant_lines
from unimetric.training.loop import train

NAMES = ["weights=1,1,1,1", "weights=0.75,1.25,1.25,1.25", "weights=0.5,1.5,1.5,1.5"]
METRICS = ("map_at_r", "recall(k=1)")
OWN = "(2.0, 0.1, 0.1, 0.3)"


def diva(config: RunConfig, **settings: object) -> RunConfig:
    parts = {"head": f"diva(dim=4, weights={OWN})", "objective": "diva(hidden=8, queue=2)", "metrics": METRICS}
    return from_settings(asdict(config) | parts | settings)


@pytest.fixture(scope="module")
def run(letters, tmp_path_factory) -> tuple[Path, dict]:
    settings = {"transform": "glyphs(size=32)", "backbone": "small(channels=16)", "batch_size": 12, "epochs": 4}
    settings |= {"optimizer": "adam(lr=3e-3)", "logger": "none", "device": "cpu", "dataset": f"pack(path='{letters}')"}
    folder = tmp_path_factory.mktemp("variants") / "run"
    return folder, train(diva(RunConfig(**settings)), folder, quiet=True)


def test_run_reports_each_weighting_at_its_best_epoch(run):
    folder, best = run
    assert json.loads((folder / "done").read_text()) == best
    assert list(best["variants"]) == NAMES
    found = read_log(folder)
    assert [line["epoch"] for line in found] == [0, 1, 2, 3, 4]
    for line in found:
        assert {f"test {name}/{metric}" for name in NAMES for metric in METRICS} <= line.keys()
    for name, own in best["variants"].items():
        values = {line["epoch"]: line[f"test {name}/map_at_r"] for line in found}
        assert own["epoch"] == max(values, key=values.__getitem__)
        line = next(line for line in found if line["epoch"] == own["epoch"])
        assert own == {"epoch": own["epoch"]} | {f"test/{metric}": line[f"test {name}/{metric}"] for metric in METRICS}
    assert best["epoch"] == max(found, key=lambda line: line["test/map_at_r"])["epoch"]
    assert best["test/map_at_r"] == next(line for line in found if line["epoch"] == best["epoch"])["test/map_at_r"]


def test_evaluate_with_other_weights_matches_variant(run):
    folder, best = run
    for name in NAMES:
        values = evaluate(folder, head=f"diva(weights=({name.removeprefix('weights=')}))")
        assert values == pytest.approx({metric: best[f"test {name}/{metric}"] for metric in METRICS}, abs=1e-6)
    assert evaluate(folder) == pytest.approx({metric: best[f"test/{metric}"] for metric in METRICS}, abs=1e-6)
    assert best["test/map_at_r"] != pytest.approx(best[f"test {NAMES[2]}/map_at_r"], abs=1e-4)
    equal = evaluate(folder, head="diva(dim=4, weights=[1, 1, 1, 1])")
    assert equal["map_at_r"] == pytest.approx(best[f"test {NAMES[0]}/map_at_r"], abs=1e-6)


def test_ensemble_reads_other_weights(run):
    folder, best = run
    values = ensemble([folder], metrics=["map_at_r"], normalise=True, head="diva(weights=(1, 1, 1, 1))")
    assert values["map_at_r"] == pytest.approx(best[f"test {NAMES[0]}/map_at_r"], abs=1e-6)


def test_adapt_evaluates_with_given_weights(run):
    """Zero-shot metric values are those of the given weights; tuning always uses equal ones."""
    settings = {"shots": 3, "episodes": 2, "iterations": 1, "looks": 0, "lr": 0.0, "epoch": "best", "metrics": METRICS[:1]}
    found = {}
    for weights in (OWN, "(1, 1, 1, 1)"):
        found[weights] = adapt(run[0], head=f"diva(weights={weights})", **settings)
        assert found[weights]["tuned_weights"] == (1, 1, 1, 1) and f"weights={weights}" in found[weights]["head"]
        assert found[weights]["summary"]["gain/map_at_r"] == (0, 0)
    assert adapt(run[0], **settings)["summary"] == found[OWN]["summary"] != found["(1, 1, 1, 1)"]["summary"]


@pytest.mark.parametrize("head", ["diva(dim=8, weights=(1, 1, 1, 1))", "linear(dim=16)", "diva(dim=8)"])
def test_evaluate_rejects_heads_of_other_weights(run, head):
    with pytest.raises(UnimetricError, match=r"trained with `head = 'diva\(dim=4") as caught:
        evaluate(run[0], head=head)
    assert "`weights`" in (caught.value.hint or "")
    with pytest.raises(UnimetricError, match="`weights` must be a list of 4"):
        evaluate(run[0], head="diva(weights=(1, 1))")


def test_resumed_run_reports_the_same_variants(config, tmp_path, monkeypatch):
    config = diva(config, epochs=3, split="standard(validation=0.34)")
    whole = train(config, tmp_path / "whole", quiet=True)
    draw = SamplesPerClass.batch

    def stop(self: SamplesPerClass, step: int) -> np.ndarray:
        if self.epoch == 2:
            raise RuntimeError("stopped")
        return draw(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(SamplesPerClass, "batch", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            train(config, tmp_path / "parts", quiet=True)
    resumed = train(config, tmp_path / "parts", quiet=True)
    assert resumed["variants"] == whole["variants"]
    for name, own in whole["variants"].items():
        scores = {line["epoch"]: score(METRICS[:1], line, f"validation {name}") for line in read_log(tmp_path / "whole")}
        assert own["epoch"] == max(scores, key=scores.__getitem__)
        assert "validation/map_at_r" in own and "test/map_at_r" in own


def test_train_prints_variants_in_short_lines(run):
    folder, best = run
    shown = CliRunner().invoke(app, ["train", str(folder / "config.toml"), "--out", str(folder), "--quiet"])
    assert shown.exit_code == 0, shown.output
    printed = shown.output.splitlines()
    assert printed[0].startswith(f"best epoch {best['epoch']} ") and "weights=" not in printed[0]
    for name, line in zip(NAMES, printed[1:4], strict=True):
        own = best["variants"][name]
        assert name in line and f"epoch {own['epoch']}" in line and f"test/map_at_r {own['test/map_at_r']:.4f}" in line
    assert "weights=" not in format_log_line(read_log(folder)[1], 4)


def test_report_reads_main_metrics_only(run):
    records, skipped = read_runs([run[0]])
    assert not skipped
    assert measured(methods(records)) == list(METRICS)


def test_lines_without_variants():
    line = {"epoch": 1, "loss": 0.5, "term/a": 1.0, "test/recall(k=1)": 0.5, "pictures of a/b": 3}
    assert variant_lines(line) == {}
    assert main_metrics(line) == {"test/recall(k=1)": 0.5}
