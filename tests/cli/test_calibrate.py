"""`calibrate`, and what `evaluate` prints about groups, thresholds and near-duplicates."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import run_command as run

from unimetric.analysis.calibrate import calibrate, check_threshold, embed_parts
from unimetric.analysis.evaluate import evaluate
from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.training.loop import train


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A csv file of twelve classes of six images with cameras, and a run with validation classes."""
    folder = tmp_path_factory.mktemp("scene")
    rng = np.random.default_rng(0)
    lines = ["path,label,camera"]
    for label in range(12):
        pattern = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        for number in range(6):
            noise = rng.integers(0, 60, (40, 40, 3), dtype=np.uint8)
            image = np.asarray(Image.fromarray(pattern).resize((40, 40)), np.int16) + noise
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{label}_{number}.png")
            lines.append(f"{label}_{number}.png,{label},c{number // 2}")
    (folder / "scene.csv").write_text("\n".join(lines))
    settings = {"transform": "base(size=32, resize=36)", "backbone": "small(channels=8)", "head": "linear(dim=8)", "batch_size": 8}
    settings |= {"dataset": f"csv(file='{folder / 'scene.csv'}')", "epochs": 1, "logger": "none", "workers": 0, "device": "cpu"}
    train(load(**settings, split="standard(validation=0.4)"), folder / "run", quiet=True)
    train(load(**settings), folder / "none", quiet=True)
    return folder


@pytest.fixture
def copy(scene: Path, tmp_path: Path) -> Path:
    shutil.copytree(scene / "run", tmp_path / "run")
    return tmp_path / "run"


def test_each_training_image_is_calibrated_once(scene: Path, tmp_path: Path) -> None:
    settings = load(scene / "run" / "config.toml", split="few_shot(shots=8, validation=0.4)")
    train(settings, tmp_path / "run", quiet=True)
    space = embed_parts(tmp_path / "run")["train"]
    assert len(set(space.names)) == space.size


def test_calibrate_chooses_on_validation_classes(copy, capsys, monkeypatch) -> None:
    code, out, err = run(capsys, monkeypatch, "calibrate", str(copy), "--fpr", "0.1", "--draws", "50")
    assert code == 0 and "warning" not in out + err, err
    found = json.loads((copy / "calibration.json").read_text())
    assert (copy / "calibration.png").read_bytes()[1:4] == b"PNG"
    spaces = embed_parts(copy)
    labels = {part: space.size for part, space in spaces.items()}
    assert labels == {"train": 24, "validation": 12, "test": 36}
    impostors = {}
    for part, space in spaces.items():
        score = (space.points @ space.points.T).double()
        impostors[part] = score[space.labels[:, None] != space.labels]
    assert (impostors["validation"] > found["threshold"] + 1e-6).double().mean() <= 0.1
    assert (impostors["validation"] > found["threshold"] - 1e-6).double().mean() > 0.1
    assert found["test"]["fpr"] == pytest.approx(float((impostors["test"] > found["threshold"]).double().mean()), abs=2e-3)
    assert (impostors["train"] > found["train_threshold"] - 1e-6).double().mean() > 0.1
    assert f"threshold {found['threshold']:.4f}" in out + err and f"{found['train_threshold']:.4f} of training" in out + err
    # Pairs of one class from one camera do not count.
    space = spaces["test"]
    same = (space.labels[:, None] == space.labels) & (space.group[:, None] != space.group)
    score = (space.points @ space.points.T).double()
    assert found["test"]["fnr"] == pytest.approx(float((score[same] <= found["threshold"]).double().mean()), abs=2e-2)


def test_intervals_need_enough_classes(copy, capsys, monkeypatch) -> None:
    """Resampling two classes cannot vary their impostor pairs, so that the interval would have no width."""
    code, out, err = run(capsys, monkeypatch, "calibrate", str(copy), "--fpr", "0.1", "--draws", "50")
    found = json.loads((copy / "calibration.json").read_text())
    assert code == 0 and found["threshold_interval"] is found["validation"]["fpr_interval"] is found["test"]["fnr_interval"] is None
    assert f"threshold {found['threshold']:.4f}   score: cosine" in out + err
    assert "validation classes: no intervals, which would be too narrow; at least 8 classes are needed, got 2" in out + err
    monkeypatch.setattr("unimetric.geometry.pair_scores.FEWEST", 6)  # test classes
    found = calibrate(copy, fpr=0.1, draws=50)
    assert found["threshold_interval"] is None
    for key in ("fpr", "fnr"):
        low, high = found["test"][f"{key}_interval"]
        assert low <= found["test"][key] <= high and low < high
    monkeypatch.setattr("unimetric.geometry.pair_scores.FEWEST", 2)
    low, high = calibrate(copy, fpr=0.1, draws=50)["threshold_interval"]
    assert low == high  # why two classes are too few


def test_evaluate_prints_how_far_off_the_threshold_is(copy, capsys, monkeypatch) -> None:
    assert check_threshold(copy, embed_parts(copy)["test"]) == ""
    found = calibrate(copy, fpr=0.1, draws=20)
    code, out, err = run(capsys, monkeypatch, "evaluate", str(copy))
    assert code == 0 and f"here {found['test']['fpr']:.4g}, {found['test']['fpr'] / 0.1:.2f} times" in out + err
    (copy / "calibration.json").write_text("{}")
    code, _, err = run(capsys, monkeypatch, "evaluate", str(copy))
    assert code == 2 and "calibration.json: unreadable" in err


def test_calibrate_warns_of_copies_in_several_classes(scene, tmp_path, capsys, monkeypatch) -> None:
    for label in range(12):
        (tmp_path / "photos" / f"{label}").mkdir(parents=True)
        for number in range(2):
            shutil.copy(scene / "0_0.png", tmp_path / "photos" / f"{label}" / f"copy_{number}.png")
            shutil.copy(scene / f"{label}_{number}.png", tmp_path / "photos" / f"{label}")
    split = "split=standard(validation=0.4)"
    settings = [f"dataset=folder(root='{tmp_path / 'photos'}')", "transform=base(size=32, resize=36)", "backbone=small(channels=8)", split]
    settings += ["head=linear(dim=8)", "batch_size=8", "epochs=1", "logger=none", "workers=0", "device=cpu"]
    assert run(capsys, monkeypatch, "train", *settings, "--out", str(tmp_path / "run"))[0] == 0
    words = ["index", str(tmp_path / "run"), str(tmp_path / "photos"), "--labels", "--out", str(tmp_path / "my.index"), "--workers", "0"]
    assert run(capsys, monkeypatch, *words)[0] == 0
    warning = "warning: the threshold accepts almost nothing, because over 1 % of the pairs of two classes have equal embeddings"
    for folder in ("run", "my.index"):
        code, out, err = run(capsys, monkeypatch, "calibrate", str(tmp_path / folder), "--fpr", "0.01", "--draws", "20")
        assert code == 0 and warning in out + err


def test_calibrate_rejects_what_it_cannot_use(scene, copy, capsys, monkeypatch) -> None:
    for words, says in (
        ([str(scene / "none")], "needs validation classes"),
        ([str(copy), "--fpr", "2"], "must be above 0 and below 1"),
        ([str(copy), "--out", str(copy / "a.png")], "must be a .json file"),
    ):
        before = sorted(copy.rglob("*"))
        code, _, err = run(capsys, monkeypatch, "calibrate", *words)
        assert code == 2 and says in err and "hint: " in err
        assert sorted(copy.rglob("*")) == before


def test_evaluate_follows_the_group_rule(scene, caplog) -> None:
    values = [evaluate(scene / "run", metrics=["recall(k=1)", "map"], group_rule=rule) for rule in ("", "class", "group", "none")]
    assert values[0] == values[1] and len({tuple(value.values()) for value in values}) == 3
    with pytest.raises(UnimetricError, match="unknown group rule `clas`"):
        evaluate(scene / "run", group_rule="clas")
    with caplog.at_level(logging.WARNING):
        evaluate(scene / "run", split="open_set(unknown=0.5)")
    assert "18 of 36 queries have no match in the gallery" in caplog.text


def test_evaluate_file_reads_groups(scene, capsys, monkeypatch, tmp_path) -> None:
    npz = tmp_path / "a.npz"
    numbers = evaluate(scene / "run", metrics=["recall(k=1)"], save=npz)
    arrays = dict(np.load(npz))
    assert sorted(set(arrays["group"])) == [0, 1, 2]
    code, out, err = run(capsys, monkeypatch, "evaluate", str(npz), "--group-rule", "class")
    assert code == 0 and f"{numbers['recall(k=1)']:.4f}" in out + err
    np.savez(npz, **arrays | {"group": np.array(["day", "night", "noon"])[arrays["group"]]})
    code, out, err = run(capsys, monkeypatch, "evaluate", str(npz))
    assert code == 0 and f"{numbers['recall(k=1)']:.4f}" in out + err


def test_evaluate_warns_about_near_duplicates(scene, copy, caplog) -> None:
    assert torch.get_num_threads() == 1
    with caplog.at_level(logging.WARNING):
        evaluate(copy, duplicates=True)
        assert "near-duplicate" not in caplog.text
        text = (scene / "scene.csv").read_text()
        Image.open(scene / "0_0.png").resize((80, 80)).save(scene / "copy.png")  # of a training image, in a test class
        (scene / "other.csv").write_text(text + "\ncopy.png,9,c5")
        evaluate(copy, duplicates=True, dataset=f"csv(file='{scene / 'other.csv'}', name='scene')")
    assert "1 of 37 queries have a near-duplicate" in caplog.text and "copy.png and" in caplog.text and "0_0.png" in caplog.text
