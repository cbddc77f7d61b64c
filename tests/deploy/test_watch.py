"""Drift of queries: images of the gallery's kind are inside, others are outside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from unimetric.cli import app
from unimetric.deploy.watch import predict_recall, watch
from unimetric.errors import UnimetricError


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
    assert found["queries"] == 11 and not found["outside"] and found["p"] > 0.01 and "recall" not in found

    result = CliRunner().invoke(app, ["watch", str(index), str(other), "--fit", "--device", "cpu"])
    assert result.exit_code == 3, result.output
    assert "outside" in result.stdout and "expected recall@1" in result.stdout
    curve = json.loads((index / "shift.json").read_text())
    assert len(curve["excess"]) == 21 and curve["change"][0] == "none 0"
    again = watch(index, same, device="cpu")  # the saved curve is used
    assert 0 <= again["recall"]["low"] <= again["recall"]["expected"] <= again["recall"]["high"] <= 1


def test_watch_rejects_few_images(index: Path, tmp_path: Path) -> None:
    few = write_images(tmp_path / "few", [Image.new("RGB", (9, 9))] * 3)
    with pytest.raises(UnimetricError, match="at least 8 readable images, got 3"):
        watch(index, few, device="cpu")
    with pytest.raises(UnimetricError):
        watch(index, tmp_path / "nothing", device="cpu")


def test_prediction_covers_measured_recall() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, 21)
    y = 0.9 - 0.5 * x + 0.02 * rng.normal(size=21)
    found = predict_recall({"excess": x.tolist(), "recall": y.tolist()}, 0.5)
    assert found["expected"] == pytest.approx(0.65, abs=0.05) and found["low"] < 0.65 < found["high"]
    assert found["high"] - found["low"] < 0.25 and found["correlation"] < -0.9 and not found["extrapolated"]
    assert predict_recall({"excess": x.tolist(), "recall": y.tolist()}, 2.0)["extrapolated"]
