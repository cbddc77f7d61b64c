"""Results of each class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from unimetric.analysis.classes import results_by_class
from unimetric.analysis.evaluate import evaluate
from unimetric.cli.measure import _result_lines
from unimetric.config import RunConfig
from unimetric.metrics import Space, measure
from unimetric.training.log import format_log_line


def test_results_by_class_match_a_loop() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 60)
    labels[0] = 9  # a class of one image, whose query has no match
    names = [f"class {label}" for label in labels]
    points = torch.from_numpy(np.eye(10)[labels] + rng.standard_normal((60, 10)))
    query = np.arange(60) < 45
    rows = results_by_class(Space(points, labels, query), names)
    unit = torch.nn.functional.normalize(points, dim=1)
    nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(1).numpy()
    assert {row["class"] for row in rows} == {f"class {label}" for label in range(5)}
    for row in rows:
        mine = [number for number in range(45) if names[number] == row["class"]]
        found = [names[nearest[number]] for number in mine]
        wrong = [name for name in found if name != row["class"]]
        assert row["queries"] == len(mine)
        assert row["recall"] == found.count(row["class"]) / len(mine)
        assert wrong.count(row["confused_with"]) == max(map(wrong.count, wrong))
    assert [row["recall"] for row in rows] == sorted(row["recall"] for row in rows)
    total = sum(row["recall"] * row["queries"] for row in rows) / sum(row["queries"] for row in rows)
    assert total == pytest.approx(measure(Space(points, labels, query), ["recall(k=1)"])["recall(k=1)"])
    perfect = results_by_class(Space(torch.eye(2)[[0, 0, 1, 1]], np.array([0, 0, 1, 1])), list("aabb"))
    assert [(row["recall"], row["confused_with"]) for row in perfect] == [(1.0, ""), (1.0, "")]


def test_evaluate_reports_classes_and_saves_paths(config: RunConfig, tmp_path: Path, capsys, monkeypatch) -> None:
    import sys

    from unimetric.cli import main

    found: list[dict] = []
    numbers = evaluate(config, save=tmp_path / "points.npz", per_class=found.extend)
    with np.load(tmp_path / "points.npz") as file:
        assert len(file["paths"]) == len(file["names"]) == len(file["embeddings"])
        assert all("letters.pack::" in path for path in file["paths"])
        assert set(file["names"]) == {row["class"] for row in found} and len(found) == 6
        counts = {str(name): int((file["names"] == name).sum()) for name in set(file["names"])}
    assert {row["class"]: row["queries"] for row in found} == counts
    words = ["unimetric", "evaluate", str(tmp_path / "points.npz"), "--per-class", "--out", str(tmp_path / "classes.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as leaving:
        main()
    assert not leaving.value.code
    written = json.loads((tmp_path / "classes.json").read_text())
    assert written == numbers | {"classes": found}
    out = capsys.readouterr().out
    assert f"{found[0]['class']:<15}  {found[0]['recall']:>8.4f}  {found[0]['queries']:>7}" in out


def test_long_lists_of_classes_are_cut() -> None:
    rows = [{"class": f"c{number}", "recall": 0.5, "queries": 3, "confused_with": "x"} for number in range(45)]
    lines = _result_lines({"recall(k=1)": 0.5}, rows)
    assert len(lines) == 1 + 1 + 20 + 1 and lines[-1].startswith("25 more classes")


def test_values_of_datasets_are_a_table() -> None:
    names = ["cub200", "cars196", "sop", "inshop", "nabirds", "dogs", "flowers102", "aircraft"]
    texts = ("per_source", "per_source(metric='recall(k=1)')", "per_source(metric='map_at_r')")
    values = {f"test/{text}/{name}": number / 100 for text in texts for number, name in enumerate(names)}
    line = {"epoch": 1, "loss": 0.5, "pictures_per_second": 10.0, "test/unified(k=1)": 0.25} | values
    first, head, *rows = format_log_line(line, 4).splitlines()
    assert first == "epoch   1/4  loss 0.5000  10 images/s  test/unified(k=1) 0.2500"
    assert head.split() == ["dataset", *names]
    assert [row.split()[0] for row in rows] == [f"test/{text}" for text in texts]
    assert rows[2].split()[1:] == [f"{number / 100:.4f}" for number in range(8)]
    assert max(map(len, (first, head, *rows))) <= 120
    many = _result_lines({f"per_source/{name}{number}": 0.5 for name in names for number in range(5)}, [])
    assert max(map(len, many)) <= 120 and sum(line.count("0.5000") for line in many) == 40
