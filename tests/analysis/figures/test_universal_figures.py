"""Figures of universal metric learning: parameters, few images per class, component sizes, and maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.analysis.figures.conftest import is_png, read_values, train_study
from typer.testing import CliRunner

from unimetric.analysis.figures.components import component_sizes
from unimetric.analysis.figures.embedding import embedding_map
from unimetric.analysis.figures.parameters import trained_parameters
from unimetric.analysis.figures.shots import few_shot_curves
from unimetric.cli import app
from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.runs.rows import read_table

PARTS = ("harmonic", "unified", "per_source/latin", "per_source/armenian")


@pytest.fixture(scope="module")
def adapters(universal: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = ["linear_probe", "stochastic_adapter(rank=4)", "puma(rank=4, prompts=2, length=2)"]
    return train_study(tmp_path_factory.mktemp("adapters") / "runs", **universal, adapter=adapter)


def test_parameters_are_those_that_are_saved(adapters: Path, tmp_path: Path) -> None:
    found = trained_parameters([adapters], tmp_path / "parameters.png", metric="harmonic")
    assert is_png(tmp_path / "parameters.png")
    rows = read_values(adapters)
    assert len(found) == len(rows) == 3
    for row in rows:
        saved = load_file(row["folder"] / "model.safetensors")
        size = sum(tensor.numel() for name, tensor in saved.items() if name != "frozen.fingerprint")
        assert found[row["labels"]["adapter"]] == pytest.approx((size, row["harmonic"]))


def test_parameters_of_several_models_are_added(universal: dict[str, Any], scripts: Any, tmp_path: Path) -> None:
    datasets = [f"pack(path='{scripts(block)}')" for block in ("armenian", "shapes")]
    study = train_study(tmp_path / "runs", **universal | {"dataset": datasets, "metrics": ["recall(k=1)"]}, adapter=["linear_probe"])
    rows = read_values(study)
    values = [row["recall(k=1)"] for row in rows]
    ((size, score),) = trained_parameters([study], tmp_path / "parameters.png").values()
    (study / "study.json").unlink()
    assert list(trained_parameters([study], tmp_path / "parameters.png").values()) == [(size, score)]
    assert score == pytest.approx(2 / (1 / values[0] + 1 / values[1]))
    saved = load_file(rows[0]["folder"] / "model.safetensors")
    assert size == 2 * sum(tensor.numel() for name, tensor in saved.items() if name != "frozen.fingerprint")


def test_components_have_ranks_and_lengths(adapters: Path, tmp_path: Path) -> None:
    found = component_sizes([adapters], tmp_path / "components.png")
    assert is_png(tmp_path / "components.png") and tuple(found) == PARTS
    values = {row["labels"]["adapter"].partition("(")[0]: row for row in read_values(adapters)}
    for metric, lengths in found.items():
        probe, adapter, puma = (values[name][metric] for name in ("linear_probe", "stochastic_adapter", "puma"))
        assert lengths == {0: {0: probe, 4: adapter}, 2: {4: puma}}


def test_shots_are_those_of_the_split(universal: dict[str, Any], tmp_path: Path) -> None:
    shots = [{"name": str(count), "split": f"few_shot(shots={count})"} for count in (8, 2)]
    heads = universal | {"head": ["linear(dim=2)", "linear(dim=8)"]}
    study = train_study(tmp_path / "runs", **heads, adapter="linear_probe", shots=shots)
    found = few_shot_curves([study], tmp_path / "shots.png")
    assert is_png(tmp_path / "shots.png") and tuple(found) == PARTS
    for row in read_values(study):
        for metric in PARTS:
            assert found[metric][row["labels"]["head"]][int(row["labels"]["shots"])] == row[metric]
    assert list(found["harmonic"]["linear(dim=2)"]) == [2, 8]


def test_map_marks_the_datasets(adapters: Path, tmp_path: Path) -> None:
    run = sorted(path.parent for path in adapters.glob("*/done"))[0]
    found = embedding_map(run, tmp_path / "map.png", points=12)
    assert is_png(tmp_path / "map.png")
    table, _ = read_table(load(run / "config.toml"))
    assert len(table.source_names) == 2
    for part in ("train", "test"):
        places, source = found[part]
        assert places.shape == (24, 2) and np.bincount(source).tolist() == [12, 12]
        assert np.isfinite(places).all() and np.ptp(places, axis=0).min() > 0
    done = CliRunner().invoke(app, ["figure", "embedding", str(run), "--by", "loss", "--out", str(tmp_path / "none.png")])
    assert done.exit_code != 0 and isinstance(done.exception, UnimetricError | SystemExit)
    assert not (tmp_path / "none.png").exists()


def test_shots_reject_other_splits(adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="has no `shots`"):
        few_shot_curves([adapters], tmp_path / "shots.png")
    assert not (tmp_path / "shots.png").exists()


def test_seeds_alone_are_averaged(universal: dict[str, Any], scripts: Any, tmp_path: Path) -> None:
    heads = universal | {"head": ["linear(dim=2)", "linear(dim=4)"]}
    study = train_study(tmp_path / "heads", **heads, adapter="linear_probe")
    with pytest.raises(UnimetricError, match=r"would be averaged with .*`head = 'linear"):
        component_sizes([study], tmp_path / "components.png")
    datasets = [f"pack(path='{scripts(block)}')" for block in ("armenian", "shapes")]
    several = universal | {"dataset": datasets, "split": "few_shot(shots=2)", "metrics": ["recall(k=1)"]}
    study = train_study(tmp_path / "datasets", **several, adapter="linear_probe")
    with pytest.raises(UnimetricError, match=r"would be averaged with .*`dataset = "):
        few_shot_curves([study], tmp_path / "shots.png")
