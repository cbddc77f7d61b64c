"""Drift of queries: images of the gallery's kind are inside, others are outside."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from unimetric import Index
from unimetric.cli import app
from unimetric.deploy import watch as watching
from unimetric.deploy.measuring import calibrate_index
from unimetric.deploy.watch import CURVE, Reference, open_curve, predict_recall, watch
from unimetric.errors import UnimetricError
from unimetric.geometry.frechet import frechet_distance


def write_images(folder: Path, images: list[Image.Image]) -> Path:
    folder.mkdir()
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    return folder


def test_watch_reports_drift_by_its_exit_code(index: Path, colored: Path, tmp_path: Path) -> None:
    files = sorted((colored / "images").rglob("*.png"))
    same = write_images(tmp_path / "same", [Image.open(file) for file in files[::3]])
    (same / "broken.png").write_bytes(b"no image")
    other = write_images(tmp_path / "other", [Image.new("RGB", (64, 48), (255, 255, 255 - each)) for each in range(12)])
    result = CliRunner().invoke(app, ["watch", str(index), str(same), "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["queries"] == found["readable"] == 11 and not found["outside"] and found["p"] > 0.01 and "recall" not in found

    result = CliRunner().invoke(app, ["watch", str(index), str(other), "--fit", "--device", "cpu"])
    assert result.exit_code == 3, result.output
    assert "outside" in result.stdout and "expected recall@1" in result.stdout
    curve = json.loads((index / "shift.json").read_text())
    assert len(curve["excess"]) == len(curve["score"]) == 21 and curve["change"][0] == "none 0"
    again = watch(index, same, device="cpu")  # the saved curve is used
    assert 0 <= again["recall"]["low"] <= again["recall"]["expected"] <= again["recall"]["high"] <= 1


def test_watch_measures_recall_of_labeled_queries(index: Path, colored: Path, tmp_path: Path) -> None:
    with open(colored / "images.csv", encoding="utf-8") as stream:
        files = {str(colored / row["path"]): row["label"] for row in csv.DictReader(stream)}
    queries = tmp_path / "today.csv"
    lines = [f"{file},{label if number % 2 else ''}" for number, (file, label) in enumerate(files.items())]
    queries.write_text("\n".join(["path,label", *lines]))
    found = watch(index, queries, device="cpu")["measured"]
    assert found["queries"] == len(files) // 2 and found["recall"] == 1 and found["low"] < 0.95 < found["high"]
    queries.write_text("\n".join(["path,label", *(f"{file},other" for file in files)]))
    result = CliRunner().invoke(app, ["watch", str(index), str(queries), "--device", "cpu"])
    assert "measured recall@1 0.0 %" in result.stdout, result.output


def test_watch_says_that_labels_of_queries_need_those_of_the_index(colored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Index.create(colored / "run", colored / "images", tmp_path / "plain", workers=0, device="cpu").close()
    assert "measured" not in watch(tmp_path / "plain", colored / "images", device="cpu") and not caplog.text
    assert "measured" not in watch(tmp_path / "plain", colored / "images.csv", device="cpu")
    assert "plain: has no column `label`" in caplog.text


def test_watch_ignores_the_query_itself(index: Path, colored: Path, tmp_path: Path) -> None:
    files = sorted((colored / "images").rglob("*.png"))
    (tmp_path / "link").symlink_to(colored / "images")
    linked = [tmp_path / "link" / file.relative_to(colored / "images") for file in files]
    copies = sorted(write_images(tmp_path / "copies", [Image.open(file) for file in files]).iterdir())
    scores = []
    for paths in (files, linked, copies):
        queries = tmp_path / "today.csv"
        queries.write_text("\n".join(["path", *map(str, paths)]))
        scores.append(watch(index, queries, device="cpu")["score"])
    assert scores[0] == scores[1] < scores[2] == pytest.approx(1)


def test_watch_prints_how_many_queries_it_compares(index: Path, colored: Path) -> None:
    words = ["watch", str(index), str(colored / "images"), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert "16 of 32 queries against 32 images" in result.stdout, result.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (found["queries"], found["readable"], found["gallery"]) == (16, 32, 32)


def test_watch_rejects_few_images(index: Path, tmp_path: Path) -> None:
    few = write_images(tmp_path / "few", [Image.new("RGB", (9, 9))] * 3)
    with pytest.raises(UnimetricError, match="at least 8 readable images, got 3"):
        watch(index, few, device="cpu")
    (tmp_path / "missing.csv").write_text("path,label\nmissing.jpg,y\n")
    with pytest.raises(UnimetricError, match=r"got 0; `missing\.jpg`: there is no such image"):
        watch(index, tmp_path / "missing.csv", device="cpu")
    with pytest.raises(UnimetricError):
        watch(index, tmp_path / "nothing", device="cpu")


def test_curve_has_the_version_that_was_measured(index: Path) -> None:
    with Index.open(index, device="cpu") as opened:
        before = opened.version

        def change(done: int, total: int) -> None:
            if done == total:
                calibrate_index(Index.open(index, device="cpu"))

        assert open_curve(opened, fit=True, progress=change)["version"] == before != opened.version
    with Index.open(index, device="cpu") as opened:
        assert open_curve(opened, fit=False, progress=None) is None


def test_curve_that_cannot_be_written_is_not_measured(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / CURVE).mkdir()
    monkeypatch.setattr(watching, "fit_curve", None)  # the call would be an error
    with Index.open(index, device="cpu") as opened, pytest.raises(UnimetricError, match="is a folder"):
        open_curve(opened, fit=True, progress=None)


def test_prediction_covers_measured_recall() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, 21)
    y = 0.9 - 0.5 * x + 0.02 * rng.normal(size=21)
    curve = {"excess": x.tolist(), "recall": y.tolist()}
    found = predict_recall(curve, excess=0.5)
    assert found["expected"] == pytest.approx(0.65, abs=0.05) and found["low"] < 0.65 < found["high"]
    assert found["high"] - found["low"] < 0.25 and found["correlation"] < -0.9 and not found["extrapolated"]
    assert predict_recall(curve, excess=2.0)["extrapolated"]
    both = curve | {"score": rng.permutation(x).tolist()}  # a score without relation to recall is not used
    assert predict_recall(both, excess=0.5, score=0.1) == found
    better = predict_recall({"excess": both["score"], "score": (1 - x).tolist(), "recall": y.tolist()}, excess=0.5, score=0.1)
    assert better["by"] == "score" and better["expected"] == pytest.approx(0.45, abs=0.05)


def test_interval_is_that_of_a_new_kind_of_change() -> None:
    """The points of one kind do not make the prediction of another look certain."""
    excess, recall = np.tile(np.linspace(0, 1, 8), 2), np.r_[np.full(8, 0.9), np.full(8, 0.3)]
    names = [f"{kind} {row}" for kind in ("blur", "zoom") for row in range(8)]
    found = predict_recall({"excess": excess.tolist(), "recall": recall.tolist(), "change": names}, excess=0.5)
    assert found["high"] - found["low"] > 0.9


def test_reference_equals_the_distance_of_the_points() -> None:
    rng = np.random.default_rng(1)
    gallery, queries = rng.normal(size=(300, 12)).astype(np.float32), rng.normal(size=(50, 12)).astype(np.float32) + 0.2
    reference = Reference(gallery)
    points = [torch.from_numpy(reference._project(each)) for each in (queries, gallery)]
    assert reference.distance(queries) == pytest.approx(float(frechet_distance(*points)), rel=1e-5)
    null = reference.null(50, 20)
    assert null.min() > 0 and null.max() < reference.distance(queries)
