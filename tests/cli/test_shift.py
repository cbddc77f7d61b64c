"""The verbs of shift, from splits to a figure, as they are typed."""

from __future__ import annotations

import errno
import json
import tempfile

import numpy as np
import pytest
from PIL import Image
from tests.conftest import run_command

SMALL = ["transform=base(size=32, resize=36)", "head=linear(dim=8)", "batch_size=8", "epochs=1", "logger=none", "workers=0", "device=cpu"]


@pytest.fixture
def typed(capsys, monkeypatch, tmp_path):
    """Type a command in an empty folder that has ten classes of six small pictures."""
    rng = np.random.default_rng(0)
    for number in range(10):
        (tmp_path / "pictures" / f"class{number}").mkdir(parents=True)
        for picture in range(6):
            noise = rng.integers(0, 60, (40, 48, 3)) + 19 * number
            Image.fromarray(noise.astype(np.uint8)).save(tmp_path / "pictures" / f"class{number}" / f"{number}_{picture}.png")
    monkeypatch.chdir(tmp_path)

    def type_(*words: str) -> tuple[int, str]:
        code, out, errors = run_command(capsys, monkeypatch, *words)
        return code, out + errors

    return type_


def test_split_train_adapt_shift_transfer(typed, tmp_path):
    data, backbone = "folder(root='pictures')", "small(channels=16)"
    make = ["split", data, "--backbone", backbone, "--features", "f.npz", "--out", "splits.json", "--swaps", "1", "--count", "4"]
    code, said = typed(*make, "--easier", "1", "--choose", "2", *SMALL)
    assert code == 0, said
    assert "split 2: " in said and (tmp_path / "splits.png").exists() and (tmp_path / "f.npz").exists()
    for number in (1, 2):
        settings = [f"dataset={data}", f"backbone={backbone}", f"split=ood(path='splits.json', split={number})", *SMALL]
        assert typed("train", *settings, "--quiet", "--out", f"run{number}")[0] == 0
    code, said = typed("adapt", "run2", "--shots", "2", "--episodes", "2", "--iterations", "3", "--crops", "1")
    assert code == 0 and "gain/recall(k=1)" in said and (tmp_path / "run2" / "adapt_2_shots.json").exists()
    code, said = typed("shift", "run1", "run2", "f.npz", "--splits", "splits.json", "--dataset", data)
    assert code == 0 and said.count("AGS") == 2 and (tmp_path / "shift.png").exists()
    distances = json.loads((tmp_path / "shift.json").read_text())["methods"]["f"]["distances"]
    assert all(f"{distance:.4g}: " in said for distance in distances)  # features of a small network are near to each other
    code, said = typed("transfer", "run1", "run2", "--to", data, "--out", "transfer.json")
    assert code == 0 and len(json.loads((tmp_path / "transfer.json").read_text())) == 2
    (tmp_path / "study" / "logs").mkdir(parents=True)  # as `bench` leaves it
    for number in (1, 2):
        (tmp_path / f"run{number}").rename(tmp_path / "study" / f"run{number}")
    code, said = typed("shift", "study")
    assert code == 0 and said.count("AGS") == 1, said
    code, said = typed("transfer", "study", "--to", data)
    assert code == 0 and said.count(" -> ") == 2, said


def test_commands_reject_invalid_arguments(typed, tmp_path):
    for words, says in (
        (
            ["split", "folder(root='pictures')", "--out", "x.json", "--targets", "1,b"],
            "must be numbers separated by commas, got `1,b`",
        ),
        (["split", "folder(root='nowhere')", "--backbone", "small", "--out", "x.json"], "does not exist"),
        (["adapt", "nowhere"], "not a run folder"),
        (["shift", "nowhere"], "not a finished run"),
        (["transfer", "nowhere", "--to", "glyphs"], "nowhere: not a run folder"),
    ):
        code, said = typed(*words)
        assert code == 2 and says in said and "hint: " in said and "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures"]


def test_split_rejects_invalid_features(typed, tmp_path):
    labels, rows = np.repeat(np.arange(10), 6), np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    make = ["split", "folder(root='pictures')", "--backbone", "small", "--features", "f.npz", "--out", "x.json", "--choose", "2"]
    for wrong in (rows.astype(str), rows[:, 0], rows[:, :, None], rows.astype(complex), rows[:, :0], np.array(3.0)):
        np.savez(tmp_path / "f.npz", embeddings=wrong, labels=labels)
        code, said = typed(*make)
        assert code == 2 and "f.npz: `embeddings` must be" in said and not (tmp_path / "x.json").exists()
    written = []
    for good in (rows, rows.astype(">f4")):  # of another byte order
        np.savez(tmp_path / "f.npz", embeddings=good, labels=labels)
        assert typed(*make, "--count", "3", "--swaps", "1")[0] == 0
        written.append((tmp_path / "x.json").read_text())
    assert written[0] == written[1]
    for targets in ("nan", "1,inf", "0,1"):
        code, said = typed(*make, "--targets", targets)
        assert code == 2 and f"`--targets` must be positive and finite, got `{targets}`" in said


def test_split_reads_features_from_a_folder_that_cannot_be_written(typed, tmp_path, monkeypatch):
    labels, rows = np.repeat(np.arange(10), 6), np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    (tmp_path / "mounted").mkdir()
    np.savez(tmp_path / "mounted" / "f.npz", embeddings=rows, labels=labels)
    open_temporary = tempfile.TemporaryFile

    def open_elsewhere(*, dir):
        if dir.name == "mounted":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_temporary(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", open_elsewhere)
    make = ["split", "folder(root='pictures')", "--backbone", "small", "--out", "x.json", "--choose", "2", "--count", "3", "--swaps", "1"]
    assert typed(*make, "--features", "mounted/f.npz")[0] == 0
    code, said = typed(*make, "--features", "mounted/new.npz")
    assert code == 2 and "new.npz: cannot be written: Permission denied" in said


def test_split_targets_are_relative_or_of_the_paper(typed, tmp_path):
    labels, rows = np.repeat(np.arange(10), 6), np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "f.npz", embeddings=rows + 3 * labels[:, None], labels=labels)
    make = ["split", "folder(root='pictures')", "--backbone", "small", "--features", "f.npz", "--out", "x.json", "--swaps", "1"]
    code, said = typed(*make, "--targets", "0.9,1", "--count", "9", "--no-removal")
    assert code == 0, said
    splits = json.loads((tmp_path / "x.json").read_text())["splits"]
    default = next(entry["distance"] for entry in splits.values() if entry["key"] == "0")
    assert [entry["target"] / default for entry in splits.values()] == pytest.approx([0.9, 1.0])
    code, said = typed(*make, "--targets", "19.2,28.5,52.6")  # distances of other features
    assert code == 2 and "times the distance of the dataset's own split, but the targets 19.2, 28.5, 52.6 are outside" in said
    code, said = typed(*make, "--targets", "cub200")
    assert code == 0 and "split 9: " in said, said


def test_shift_and_ensemble_reject_invalid_metrics(typed, tmp_path):
    data = "folder(root='pictures')"
    make = ["split", data, "--backbone", "small(channels=16)", "--features", "f.npz", "--out", "s.json", "--swaps", "1", "--count", "4"]
    assert typed(*make, "--choose", "2", *SMALL)[0] == 0
    for words, says in (
        (["f.npz", "--metrics", ""], "`metrics` must name at least one metric"),
        (["f.npz", "--metrics", "per_source"], "`--metrics` requires metrics with one value"),
        (["f.npz", "--structure", "pi_ratio"], "have no structure of training"),
    ):
        code, said = typed("shift", *words, "--splits", "s.json", "--dataset", data)
        assert code == 2 and says in said and "hint: " in said and not (tmp_path / "shift.json").exists()
    code, said = typed("ensemble", "run", "--metrics", " ; ")
    assert code == 2 and "an ensemble requires at least one metric" in said
