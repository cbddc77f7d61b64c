"""Run folders, a pack and a study of commit 2e3eac6 work with the present code, and give the same numbers.

`make_data.py` wrote `data/` with the code of that commit. Names, ids and keys must be equal. Numbers may
differ by rounding, on a CPU of the same kind. The embeddings of these small runs differ by less than a
thousandth, so that on another kind rounding decides which are neighbors, and numbers must only be there.
"""

from __future__ import annotations

import csv
import json
import math
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import read_log

from unimetric.analysis.evaluate import evaluate
from unimetric.config import load
from unimetric.images.pack import Pack, decode
from unimetric.report import report
from unimetric.report.folders import read_runs
from unimetric.report.numbers import methods
from unimetric.runs.weights import read_tensors
from unimetric.spec import create, find, names, signature
from unimetric.studies.grid import read_grid
from unimetric.studies.local import study
from unimetric.training.loop import train

DATA = Path(__file__).parent / "data"
SAME_CPU = platform.machine().lower() in ("x86_64", "amd64")
NUMBERS = json.loads((DATA / "numbers.json").read_text())
COMPONENTS = json.loads((DATA / "components.json").read_text())


#: Defaults that later corrections changed on purpose: what gives the old behavior now.
OLD_DEFAULTS = {"diva": ("diva(hidden=16)", "diva(hidden=16, intra_triplets='distinct')")}
CHANGED_DEFAULTS = {("heads/crt", "init")}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the data as working directory: its configs name the pack by a relative path."""
    copy = tmp_path / "data"
    shutil.copytree(DATA, copy)
    monkeypatch.chdir(copy)
    return copy


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Everything that was there is there now, numbers up to rounding. New keys are allowed."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert key in found, f"{where}/{key} is missing"
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, int | float) and not SAME_CPU:
        assert isinstance(found, int | float), where
    elif isinstance(expected, float):
        # The weights of a resumed run have gone through nine steps of another CPU's rounding.
        tolerance = 1e-4 if "sums" in where else 1e-6
        assert math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance), f"{where}: {found} was {expected}"
    else:
        assert found == expected, where


def test_old_pack_opens_with_the_same_images() -> None:
    pack, expected = Pack.open(DATA / "letters.pack"), NUMBERS["pack"]
    assert pack.table.labels.tolist() == expected["labels"]
    assert pack.table.train.tolist() == expected["train"]
    assert [Path(path).name for path in pack.table.paths] == [Path(path).name for path in expected["paths"]]
    assert list(pack.table.class_names) == expected["class_names"]
    assert [int(decode(path).sum()) for path in pack.table.paths] == expected["sums"]


@pytest.mark.parametrize("part", ["test", "train"])
def test_old_run_evaluates_to_the_same_numbers(data: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unimetric.metrics._measure.FEWEST", 1)  # its interval is that of few classes
    expected = NUMBERS["evaluate"][part]
    metrics = [text for text in expected if "/" not in text]
    assert_same(evaluate("runs/finished", metrics=metrics, part=part, level=0.95), expected)


def test_old_run_evaluates_reranked(data: Path) -> None:
    assert_same(evaluate("runs/finished", rerank=True), NUMBERS["rerank"])


def test_old_finished_run_is_not_trained_again(data: Path) -> None:
    before = (data / "runs/finished/model.safetensors").read_bytes()
    best = train(load("runs/finished/config.toml"), "runs/finished", quiet=True)
    assert best == json.loads((DATA / "runs/finished/done").read_text())
    assert (data / "runs/finished/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", sorted(NUMBERS["resumed"]))
def test_old_run_resumes_within_an_epoch(data: Path, name: str) -> None:
    folder, expected = data / "runs" / name, NUMBERS["resumed"][name]
    config = load(folder / "config.toml")
    assert config.run_id == expected["run_id"]
    if name in OLD_DEFAULTS:
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace(*OLD_DEFAULTS[name]))
        config = load(folder / "config.toml")
    best = train(config, folder, quiet=True)
    assert_same(best, expected["best"])
    lines = read_log(folder)
    assert_same(lines, expected["lines"])
    tensors = read_tensors(folder / "checkpoint.safetensors")[0]
    assert set(tensors) - {"random/cpu"} == set(expected["sums"])
    sums = {key: [value.double().sum().item(), value.double().abs().sum().item()] for key, value in tensors.items()}
    assert_same(sums, expected["sums"], "sums")


def test_old_study_is_complete(data: Path) -> None:
    runs = read_grid("study.toml")
    assert [run.config.run_id for run in runs] == list(NUMBERS["study"])
    before = {path: path.read_bytes() for path in (data / "study").rglob("*") if path.is_file()}
    assert set(study(runs, "study", quiet=True).values()) == {"done"}
    assert all(path.read_bytes() == text for path, text in before.items() if path.name != "study.json")


def test_old_study_resumes_a_run_that_is_not_finished(data: Path) -> None:
    run_id = next(iter(NUMBERS["study"]))
    (data / "study" / run_id / "done").unlink()
    assert set(study(read_grid("study.toml"), "study", quiet=True).values()) == {"done"}
    assert_same(json.loads((data / "study" / run_id / "done").read_text()), NUMBERS["study"][run_id])


def test_old_study_reports_the_same_numbers(data: Path) -> None:
    records, skipped = read_runs([data / "study"])
    assert not skipped
    assert_same({record.run_id: record.best for record in records}, NUMBERS["study"])
    assert all(record.gallery for record in records)
    rows = list(csv.DictReader(NUMBERS["report"].splitlines()))
    (method,) = methods(records)
    for row in rows:
        scale = 1 if row["metric"] == "spectral_decay" else 100
        assert method.name == row["method"] and len(method.runs) == int(row["seeds"])
        assert f"{scale * method.mean(row['metric']):.3f}".startswith(row["mean"])


def test_old_study_and_runs_make_a_report(data: Path) -> None:
    skipped = report([data / "study", data / "runs"], "report.html")
    assert sorted(folder.name for folder, _ in skipped) == sorted(NUMBERS["resumed"])
    rows = list(csv.DictReader((data / "report.csv").read_text().splitlines()))
    old = list(csv.DictReader(NUMBERS["report"].splitlines()))
    for row in old:
        same = [each for each in rows if each["method"] == "Margin" and each["metric"] == row["metric"] and each["seeds"] == "2"]
        assert same and same[0]["mean"] == row["mean"] and same[0]["dataset"] == row["dataset"]


def test_run_ids_are_the_old_ones() -> None:
    assert len(NUMBERS["run_ids"]) > 100
    for settings, run_id in NUMBERS["run_ids"]:
        assert load(**settings).run_id == run_id, settings


def test_components_keep_their_arguments_and_defaults() -> None:
    for key, expected in COMPONENTS["signatures"].items():
        kind, _, name = key.partition("/")
        assert name in names(kind), key
        found = signature(find(kind, name)).parameters
        for argument, default in expected.items():
            assert argument in found, f"{key} has no `{argument}`"
            now = found[argument].default
            if (key, argument) not in CHANGED_DEFAULTS:
                assert default == ("required" if now is found[argument].empty else repr(now)), f"{key}: {argument}"


def test_components_keep_the_names_of_their_state() -> None:
    offered: dict[str, dict[str, Any]] = {"losses": {"num_classes": 5, "dim": 8}, "heads": {"features": 16}}
    for key, expected in COMPONENTS["states"].items():
        kind, _, text = key.partition("/")
        if kind == "adapters":
            module = find(kind, text)(create("backbones", "timm(name='test_vit', image_size=32)"))
        else:
            module = create(kind, text, **offered.get(kind, {}))
        assert {name: list(tensor.shape) for name, tensor in module.state_dict().items()} == expected, key


def test_arrays_of_an_old_gallery() -> None:
    for run_id in NUMBERS["study"]:
        with np.load(DATA / "study" / run_id / "gallery.npz") as arrays:
            assert {"embeddings", "labels", "neighbours", "spectrum", "thumbnails"} <= set(arrays)
