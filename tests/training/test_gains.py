"""Gain over the untrained network: the interval, other datasets, resumed runs, and what is printed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import changed
from typer.testing import CliRunner

from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.config import RunConfig
from unimetric.errors import Interrupted, UnimetricError
from unimetric.geometry.space import Space
from unimetric.metrics import interval
from unimetric.report.folders import read_runs
from unimetric.report.numbers import methods
from unimetric.report.tables import results
from unimetric.samplers.samples_per_class import SamplesPerClass
from unimetric.training.loop import train
from unimetric.training.scores import compare_scores, score_of

OTHER = "glyphs(blocks='shapes')"


def spaces() -> list[Space]:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 5)
    points = [rng.normal(size=(12, 4))[labels] + spread * rng.normal(size=(60, 4)) for spread in (2.0, 0.7)]
    return [Space(torch.from_numpy(each), torch.from_numpy(labels)) for each in points]


def test_gain_and_interval_are_paired_by_class() -> None:
    before, after = spaces()
    gain = compare_scores(score_of(before, "recall(k=1)"), score_of(after, "recall(k=1)"), "recall(k=1)")
    hits = []
    for space in (before, after):
        unit = torch.nn.functional.normalize(space.points.double())
        near = unit @ unit.T
        near.fill_diagonal_(-torch.inf)
        hits.append((space.labels[near.argmax(1)] == space.labels).double().view(12, 5).sum(1).numpy())
    assert gain["gain"] == pytest.approx((hits[1] - hits[0]).sum() / 60)
    draws = np.random.default_rng(1).integers(12, size=(20000, 12))
    low, high = np.quantile((hits[1] - hits[0])[draws].sum(1) / 60, [0.025, 0.975])
    assert gain["from"] == pytest.approx(low, abs=0.02)
    assert gain["to"] == pytest.approx(high, abs=0.02)
    alone = [interval(space, "recall(k=1)") for space in (before, after)]
    assert gain["to"] - gain["from"] < sum(high - low for low, high in alone)


def test_few_classes_have_no_interval() -> None:
    few = [Space(space.points[:35], space.labels[:35]) for space in spaces()]  # seven classes
    before, after = (score_of(space, "recall(k=1)") for space in few)
    assert "from" not in compare_scores(before, after, "recall(k=1)")
    with pytest.raises(UnimetricError, match="needs queries of at least 8 classes, got 7"):
        interval(few[0], "recall(k=1)")
    low, high = interval(few[0], "recall(k=1)", method="wilson")
    assert low < before["value"] < high


def test_lower_is_better_and_metrics_without_terms() -> None:
    before, after = spaces()
    metric = "fnmr_at_fmr(fmr=0.1)"
    fewer = compare_scores(score_of(before, metric), score_of(after, metric), metric)
    assert fewer["gain"] == pytest.approx(fewer["untrained"] - fewer["trained"])
    assert "from" not in compare_scores(score_of(before, "nmi"), score_of(after, "nmi"), "nmi")


@pytest.mark.parametrize("adapter", ["", "lora(rank=2)"])
def test_a_run_measures_its_gain_elsewhere(config: RunConfig, tmp_path: Path, adapter: str) -> None:
    network = {"backbone": "timm(name='test_vit', image_size=32)", "adapter": adapter}
    run = changed(config, epochs=1, watch_datasets=[OTHER], **network)
    best = train(run, tmp_path / "run", quiet=True)
    assert list(best["gain"]) == ["test", OTHER]
    own, other = best["gain"].values()
    assert own["trained"] == best["test/recall(k=1)"]
    assert own["untrained"] == best["raw"]["test/recall(k=1)"]
    assert "from" not in own  # six classes
    assert other["from"] <= other["gain"] <= other["to"]
    assert other["trained"] == pytest.approx(evaluate(tmp_path / "run", dataset=OTHER)["recall(k=1)"])
    raw = evaluate(changed(run, dataset=OTHER, head="identity", adapter="", watch_datasets=[]))
    assert other["untrained"] == pytest.approx(raw["recall(k=1)"])
    assert json.loads((tmp_path / "run" / "done").read_text())["gain"] == best["gain"]


def test_best_weights_are_measured_also_after_a_resume(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate destroys the network, so an earlier epoch is the best."""
    run = changed(config, epochs=2, watch_datasets=[OTHER], optimizer="sgd(lr=1e4)")
    unbroken = train(run, tmp_path / "unbroken", quiet=True)
    assert unbroken["epoch"] < 2
    assert unbroken["gain"][OTHER]["trained"] == pytest.approx(evaluate(tmp_path / "unbroken", dataset=OTHER)["recall(k=1)"])
    draw = SamplesPerClass.batch

    def ask(self: SamplesPerClass, step: int) -> np.ndarray:
        if (self.epoch, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self, step)

    monkeypatch.setattr(SamplesPerClass, "batch", ask)
    with pytest.raises(Interrupted):
        train(run, tmp_path / "broken", quiet=True)
    monkeypatch.undo()
    assert train(run, tmp_path / "broken", quiet=True)["gain"] == unbroken["gain"]


def test_a_worse_network_is_the_last_line(config: RunConfig, tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(changed(config, epochs=1, watch_datasets=[OTHER], optimizer="sgd(lr=1e4)", evaluate_every=0).dump())
    result = CliRunner().invoke(app, ["train", str(settings), "--out", str(tmp_path / "run")])
    lines = result.output.strip().splitlines()
    assert any(line.startswith(f"untrained network on {OTHER}: recall(k=1) 0.") for line in lines)
    assert any(line.startswith(f"gain over the untrained network on {OTHER}: recall(k=1) ") and "95% interval" in line for line in lines)
    last = " ".join(lines[-3:])  # a terminal may wrap it
    assert "warning:" in last and "ends below the untrained network" in last


def test_report_shows_gains(config: RunConfig, tmp_path: Path) -> None:
    best = train(changed(config, epochs=1, watch_datasets=[OTHER]), tmp_path / "run", quiet=True)
    (table,) = results(methods(read_runs([tmp_path])[0]))
    for name, place in {"test": "its test classes", OTHER: OTHER}.items():
        gain = best["gain"][name]
        expected = f"on {place}: recall(k=1) {100 * gain['gain']:+.1f} points"
        if name == OTHER:  # the other one has too few classes
            expected += f", 95% interval {100 * gain['from']:+.1f} to {100 * gain['to']:+.1f}"
        assert any(expected in note for note in table.notes)
    damaged = json.loads((tmp_path / "run" / "done").read_text()) | {"gain": {"test": {"metric": "recall(k=1)", "gain": "much"}}}
    (tmp_path / "run" / "data.json").unlink()
    (tmp_path / "run" / "done").write_text(json.dumps(damaged))
    records, skipped = read_runs([tmp_path])
    assert not records and "is not a number" in skipped[0][1]


def test_rejects_a_dataset_that_does_not_exist(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="nowhere"):
        train(changed(config, watch_datasets=["folder(root='nowhere')"]), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
