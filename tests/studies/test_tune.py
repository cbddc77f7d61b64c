"""Searching: ranges are read strictly, and test classes choose nothing."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from unimetric.errors import UnimetricError
from unimetric.studies.ranges import boundary_runs, read_search
from unimetric.studies.tune import trial_score, tune

SEARCH = """
loss = "margin(beta={beta})"
seed = 0
split = "standard(validation=0.3)"

[search]
beta = {low = 0.6, high = 1.4}
"""


@pytest.fixture
def search(grid: Path, tmp_path: Path) -> Path:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    settings = [line for line in grid.read_text().splitlines() if not line.startswith(("loss", "seed"))]
    path = tmp_path / "search.toml"
    path.write_text("\n".join(settings) + SEARCH)
    return path


def test_tune_resumes_and_scores_on_validation(search: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    value, best = tune(search, out, trials=1)
    once = {done: done.stat().st_mtime_ns for done in out.glob("*/done")}
    value, best = tune(search, out, trials=2)
    done = {done: done.stat().st_mtime_ns for done in out.glob("*/done")}
    assert len(once) == 1
    assert len(done) == 2
    assert done.items() >= once.items()
    assert json.loads((out / "study.json").read_text()).keys() == {path.parent.name for path in done}
    lines = [json.loads(path.read_text()) for path in done]
    assert value == max(line["validation/recall(k=1)"] for line in lines)
    assert tomllib.loads((out / "best.toml").read_text())["loss"] == f"margin(beta={best['beta']})"


def test_tune_never_loses_a_better_trial_silently(
    search: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two trials is the best one."""
    out = tmp_path / "runs"
    scores: dict[Path, float] = {}
    monkeypatch.setattr("unimetric.studies.tune.trial_score", lambda folder: scores.setdefault(folder, 0.25 * (1 + len(scores) % 2)))
    _, best = tune(search, out, trials=2)
    assert list(scores.values()) == [0.25, 0.5]
    assert tune(search, out, trials=1) == (0.5, best) and len(scores) == 2
    stored = (out / "best.toml").read_text()
    assert tomllib.loads(stored)["loss"] == f"margin(beta={best['beta']})" and "replaces" not in caplog.text
    tune(search, out, trials=1, seed=1)
    assert (out / "best.toml").read_text() != stored
    (folder,) = [folder for folder, score in scores.items() if score == 0.5]
    assert f"best.toml: replaces a better trial of another search, 0.5000; its settings are in {folder / 'config.toml'}" in caplog.text


def test_tune_warns_if_the_best_trial_has_not_learned(search: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune(search, tmp_path / "runs", trials=1, optimizer="sgd(lr=1e-12)")
    assert "the best trial is best before training" in caplog.text


def test_tune_rejects_split_without_validation(search: Path, tmp_path: Path) -> None:
    for split in ("standard", "standard(validation=0)", "standard(validation=0.0)", "folder(name='validation=0.2')"):
        with pytest.raises(UnimetricError, match="no validation classes") as refused:
            tune(search, tmp_path / "runs", split=split)
        assert "standard(validation=0.2)" in refused.value.hint
    assert not (tmp_path / "runs").exists()


def test_trial_score_rejects_test_classes(tmp_path: Path) -> None:
    (tmp_path / "done").write_text('{"epoch": 1, "chosen_on": "test", "test/recall(k=1)": 0.9}')
    with pytest.raises(UnimetricError, match="has no results on validation classes"):
        trial_score(tmp_path)


def test_trial_score_uses_better_of_first_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judging.py").write_text("def error(space): ...\n\nerror.better = 'lower'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "judging")
    line = {"epoch": 1, "chosen_on": "validation", "validation/judging.error": 0.3, "validation/recall": 0.9, "test/judging.error": 0.4}
    (tmp_path / "done").write_text(json.dumps(line))
    (tmp_path / "config.toml").write_text("metrics = ['judging.error', 'recall']")
    assert trial_score(tmp_path) == -0.3
    (tmp_path / "config.toml").write_text("metrics = ['recall', 'judging.error']")
    assert trial_score(tmp_path) == 0.9


def test_boundary_runs_use_ends_of_ranges(search: Path) -> None:
    assert [run.config.loss for run in boundary_runs(search)] == ["margin(beta=0.6)", "margin(beta=1.4)"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loss = 'margin'", "a search requires at least one `{name}`"),
        ("loss = 'margin(beta={beta})'", "`beta` is in the settings only"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {low = 0, high = 1}\ngamma = {choices = [1]}", "`gamma` is in [search] only"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {low = 0}", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = [0, 1]", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {low = 2, high = 1}", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {low = 0, high = 1, log = true}", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {low = 0.5, high = 2, whole = true}", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {choices = []}", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\n[search]\nbeta = {low = 0, high = inf}", "the range of `beta` is not valid"),
        ("loss = 'margin(beta={beta})'\nsearch = 3", "`search` must be a table"),
    ],
)
def test_read_search_rejects_invalid_files(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "search.toml"
    path.write_text(text)
    with pytest.raises(UnimetricError) as refused:
        read_search(path)
    assert says in refused.value.message
    assert str(path) in refused.value.message


def test_tune_checks_overrides(search: Path, tmp_path: Path) -> None:
    for overrides, says in (
        ({"loss": "margin(beta={other})"}, "`beta` is in [search] only"),
        ({"loss": "margin"}, "a search requires at least one `{name}`"),
        ({"miner": "{other}"}, "`other` is in the settings only"),
    ):
        with pytest.raises(UnimetricError, match=re.escape(says)):
            tune(search, tmp_path / "runs", **overrides)
    assert not (tmp_path / "runs").exists()


def test_tune_checks_every_choice_first(search: Path, tmp_path: Path) -> None:
    search.write_text(search.read_text() + 'way = {choices = ["constant", "constent", "cosine"]}\n')
    for seed in range(3):
        with pytest.raises(UnimetricError, match="no `constent` in schedules"):
            tune(search, tmp_path / "runs", trials=1, seed=seed, schedule="{way}")
    assert not (tmp_path / "runs").exists()


def test_tune_checks_both_ends_of_a_range_first(search: Path, tmp_path: Path) -> None:
    search.write_text(search.read_text() + "clip = {low = -1e-9, high = 1.0}\n")
    with pytest.raises(UnimetricError, match="`clip_norm` must be at least 0"):
        tune(search, tmp_path / "runs", trials=1, clip_norm="{clip}")
    assert not (tmp_path / "runs").exists()
