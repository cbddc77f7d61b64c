"""Figures over the runs of a study: aggregation, correlation of metrics, and the shift with its spread."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tests.analysis.figures.conftest import is_png, read_values, train_study
from typer.testing import CliRunner

from unimetric.analysis.curves import ags
from unimetric.analysis.figures._runs import read_finished
from unimetric.analysis.figures.aggregate import aggregate
from unimetric.analysis.figures.correlation import metric_correlation
from unimetric.analysis.figures.parameters import trained_parameters
from unimetric.analysis.shift import draw_report, shift_report
from unimetric.cli import app
from unimetric.errors import UnimetricError

METRICS = ("recall(k=1)", "map_at_r", "nmi")


def test_aggregate_divides_by_the_best_value(study: Path, tmp_path: Path) -> None:
    found = aggregate([study], tmp_path / "aggregate.png", by="setting")
    assert is_png(tmp_path / "aggregate.png")
    assert {factor: set(values) for factor, values in found.items()} == {
        "dimension": {"linear(dim=2)", "linear(dim=4)"},
        "batch": {"12", "24"},  # 24 is the default, and the grid lists its run under the first factor
    }
    rows = read_values(study)
    for loss in ("margin", "multi_similarity"):
        for place, metric in enumerate(METRICS):
            mean = {
                head: np.mean([row[metric] for row in rows if row["labels"]["loss"] == loss and row["labels"].get("head") == head])
                for head in ("linear(dim=2)", "linear(dim=4)")
            }
            for head, value in mean.items():
                assert found["dimension"][head][loss][place] == pytest.approx(value / max(mean.values()))
    scores = [score for values in found.values() for methods in values.values() for each in methods.values() for score in each]
    assert max(scores) == 1 and min(scores) < 0.99
    with pytest.raises(UnimetricError, match=r"axis of the study .*got `samplr`"):
        aggregate([study], tmp_path / "none.png", by="samplr")
    assert not (tmp_path / "none.png").exists()


def test_figures_average_only_seeds(letters: Path, tmp_path: Path) -> None:
    common = {"dataset": f"pack(path='{letters}')", "metrics": ["recall(k=1)"], "loss": ["margin", "triplet"]}
    study = train_study(tmp_path / "runs", seed=[0, 1], **common)
    train_study(study, seed=2, epochs=2, **common)  # the folder has runs of two versions of the grid
    for draw in (partial(aggregate, by="loss"), trained_parameters):
        with pytest.raises(UnimetricError, match=r"would be averaged with .* has `epochs = 2` instead of 1"):
            draw([study], tmp_path / "figure.png")


def test_correlation_is_pearson_over_runs(study: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["figure", "correlation", str(study), "--out", str(tmp_path / "command.png")])
    assert done.exit_code == 0 and is_png(tmp_path / "command.png")
    (matrix,) = metric_correlation([study], tmp_path / "correlation.png").values()
    rows = read_values(study)
    assert matrix.shape == (3, 3)  # without the spectral decay, which is neither better nor worse
    for i, one in enumerate(METRICS):
        for j, other in enumerate(METRICS):
            assert matrix[i, j] == pytest.approx(stats.pearsonr([row[one] for row in rows], [row[other] for row in rows])[0])


def test_untrained_runs_are_reported(letters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = train_study(
        tmp_path / "runs", dataset=f"pack(path='{letters}')", optimizer="adam(lr=1e-30)", metrics=["recall(k=1)", "nmi"], seed=[0, 1, 2]
    )
    with caplog.at_level(logging.WARNING, "unimetric"):
        metric_correlation([runs], tmp_path / "figure.png")
    assert "3 of 3 runs are best before training" in caplog.text


def test_shift_has_bars_and_an_interval_of_ags(shifted: Path, tmp_path: Path) -> None:
    report = shift_report(sorted((shifted / "runs").glob("*/")), metrics=["recall(k=1)", "map_at_r"])
    rows = read_values(shifted / "runs")
    name = next(name for name in report["methods"] if "margin" in name)
    method = report["methods"][name]
    own = [row for row in rows if 'loss = "margin' in (row["folder"] / "config.toml").read_text()]
    table = np.array([[row["map_at_r"] for row in own if f"split={split})" in row["labels"]["split"]] for split in method["splits"]])
    assert table.shape == (2, 3)
    assert method["deviations"]["map_at_r"] == pytest.approx(table.std(1, ddof=1))
    areas = [ags(method["distances"], table[:, seed]) for seed in range(3)]
    low, high = stats.t.interval(0.95, 2, np.mean(areas), np.std(areas, ddof=1) / np.sqrt(3))
    spread = method["ags_spread"]["map_at_r"]
    assert spread["seeds"] == 3 and (spread["low"], spread["high"]) == pytest.approx((low, high))
    assert spread["low"] < method["ags"]["map_at_r"] < spread["high"]
    (other,) = (each for each in report["methods"] if each != name)
    assert report["methods"][other]["ags_spread"] == {"recall(k=1)": {}, "map_at_r": {}}
    assert report["methods"][other]["deviations"]["map_at_r"] == [0.0, 0.0]
    draw_report(tmp_path / "shift.png", report, "map_at_r")
    assert is_png(tmp_path / "shift.png")
    json.dumps(report)
    words = ["shift", *map(str, sorted((shifted / "runs").glob("*/"))), "--out", str(tmp_path / "shift.json")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "3 seeds)" in done.output


def test_a_copied_run_is_no_further_seed(shifted: Path, study: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (shifted / "runs", study):
        runs = sorted(folder.glob("*/"))
        copy = Path(shutil.copytree(runs[0], tmp_path / folder.parent.name))
        caplog.clear()
        if folder == study:
            assert [run.folder for run in read_finished([*runs, copy])] == [run.folder for run in read_finished(runs)]
        else:
            assert shift_report([*runs, copy], metrics=["map_at_r"]) == shift_report(runs, metrics=["map_at_r"])
        assert f"{copy}: left out, the same run as {runs[0]}" in caplog.text
