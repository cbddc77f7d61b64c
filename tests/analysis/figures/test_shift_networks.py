"""Figures of the ooDML supplement: networks that measure the shift, maps of splits, and shifts between datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
from tests.analysis.figures.conftest import SMALL, is_png, train_study
from typer.testing import CliRunner

from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.figures.bias import network_bias
from unimetric.analysis.figures.classes import class_maps
from unimetric.analysis.figures.domains import domain_shift
from unimetric.analysis.split import features_of
from unimetric.cli import app
from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.spec import create


def test_networks_measure_the_same_splits(shifted: Path, letters: Path, tmp_path: Path) -> None:
    dataset = f"pack(path='{letters}')"
    files = [shifted / "a.npz", shifted / "b.npz"]
    found = network_bias(files, tmp_path / "bias.png", splits=str(shifted / "a.json"), dataset=dataset)
    assert is_png(tmp_path / "bias.png")
    history = {step["key"]: step["distance"] for step in json.loads((shifted / "a.json").read_text())["history"]}
    assert found[str(files[0])] == pytest.approx(history)
    assert found[str(files[1])].keys() == history.keys() and found[str(files[1])] != pytest.approx(history)
    own = network_bias([shifted / "a.json", shifted / "b.json"], tmp_path / "own.png")
    assert own[str(shifted / "a.json")] == pytest.approx(history)
    with pytest.raises(UnimetricError, match="features require splits and a dataset"):
        network_bias(files, tmp_path / "none.png")


def test_maps_draw_the_sides_of_each_split(shifted: Path, letters: Path, tmp_path: Path) -> None:
    dataset = f"pack(path='{letters}')"
    projection, drawn = class_maps(shifted / "a.npz", tmp_path / "classes.png", splits=str(shifted / "a.json"), dataset=dataset)
    assert is_png(tmp_path / "classes.png") and projection in ("PCA", "UMAP")
    table = create("datasets", dataset)
    for number, (train, test) in drawn.items():
        split = create("splits", f"ood(path='{shifted / 'a.json'}', split={number})", table=table, seed=0)
        assert np.array_equal(np.sort(train), np.sort(split.train)) and np.array_equal(np.sort(test), np.sort(split.test))
    done = CliRunner().invoke(app, ["figure", "classes", str(shifted / "a.npz"), "--out", str(tmp_path / "none.png")])
    assert done.exit_code != 0 and not (tmp_path / "none.png").exists()


def test_domains_equal_the_formula(scripts: Callable[[str], Path], tmp_path: Path) -> None:
    datasets = [f"pack(path='{scripts(block)}')" for block in ("armenian", "shapes")]
    files = [tmp_path / "armenian.npz", tmp_path / "shapes.npz"]
    means = []
    for dataset, file in zip(datasets, files, strict=True):
        table, features = features_of(load(**SMALL | {"dataset": dataset}), path=file)
        sides = [np.unique(table.labels[table.train == side]) for side in (True, False)]
        means.append([np.stack([features[table.labels == label].astype(float).mean(0) for label in side]) for side in sides])
    study = train_study(tmp_path / "runs", dataset=datasets, metrics=["recall(k=1)"])
    runs = sorted(path.parent for path in study.glob("*/done"))
    found = domain_shift([*files, *runs], tmp_path / "domains.png", datasets=datasets)
    assert is_png(tmp_path / "domains.png")
    for i, (train, _) in enumerate(means):
        for j, (_, test) in enumerate(means):
            one, two = np.cov(train.T), np.cov(test.T)
            root = np.real(np.trace(scipy.linalg.sqrtm(one @ two)))
            expected = ((train.mean(0) - test.mean(0)) ** 2).sum() + np.trace(one) + np.trace(two) - 2 * root
            assert found["distances"][i][j] == pytest.approx(expected, rel=1e-3)
    (scores,) = found["scores"].values()
    for run in runs:
        source = load(run / "config.toml").dataset
        to = next(dataset for dataset in datasets if dataset != source)
        assert scores[source][to] == pytest.approx(evaluate(run, dataset=to, split="standard")["recall(k=1)"])
    with pytest.raises(UnimetricError, match="at least 2 datasets"):
        domain_shift(files, tmp_path / "none.png", datasets=datasets[:1])
