"""Run folders: a broken one is skipped and listed, and the others are reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.report import report
from unimetric.report.folders import read_runs


def test_runs_keep_order_of_grid(runs: Callable[..., Path]) -> None:
    records, skipped = read_runs([runs(4)])
    assert [record.labels["method"] for record in records] == ["margin(beta=1.2) <0>"] * 2 + ["multi_similarity <1>"] * 2
    assert records[0].value("recall(k=1)") == 0.5
    assert not skipped


def test_run_of_two_studies_counts_once(runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(2)
    shutil.copytree(place, tmp_path / "second")
    records, skipped = read_runs([place, tmp_path / "second"])
    assert len(records) == 2
    assert [reason for _, reason in skipped] == [f"the same run as {record.folder}" for record in records]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "not finished": lambda folder: (folder / "done").unlink(),
    "half a `done`": lambda folder: (folder / "done").write_text('{"epoch": 4, "test/rec'),
    "a `done` that is no table": lambda folder: (folder / "done").write_text("3"),
    "a `done` without numbers": lambda folder: (folder / "done").write_text('{"epoch": 4, "test/recall(k=1)": null}'),
    "a `done` of other kinds": lambda folder: (folder / "done").write_text('{"epoch": 4, "lower_is_better": 3}'),
    "a line of words": lambda folder: (folder / "metrics.jsonl").write_text('{"epoch": 1, "test/recall(k=1)": "high"}\n'),
    "half a line": lambda folder: (folder / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo'),
    "a line without an epoch": lambda folder: (folder / "metrics.jsonl").write_text("{}\n"),
    "no settings": lambda folder: (folder / "config.toml").unlink(),
    "half the settings": lambda folder: (folder / "config.toml").write_text('dataset = "cub'),
    "settings in zeros": lambda folder: (folder / "config.toml").write_bytes(b"\xff\x00" * 10),
    "settings that lack some": lambda folder: (folder / "config.toml").write_text("seed = 0\n"),
    "settings with a date": lambda folder: (folder / "config.toml").open("a").write("when = 2026-01-01\n"),
    "no environment": lambda folder: (folder / "environment.json").unlink(),
    "an empty gallery": lambda folder: (folder / "gallery.npz").write_bytes(b""),
    "half a gallery": lambda folder: (folder / "gallery.npz").write_bytes((folder / "gallery.npz").read_bytes()[:900]),
    "a gallery without ends": lambda folder: _altered(folder, ends=np.array(3)),
    "a gallery of flat points": lambda folder: _altered(folder, embeddings=np.zeros(24)),
    "a gallery at no distance": lambda folder: _altered(folder, shift=np.array("far")),
    "a gallery that points outside": lambda folder: _altered(folder, neighbours=np.full((3, 4), 99)),
}


def _altered(folder: Path, **arrays: np.ndarray) -> None:
    np.savez(folder / "gallery.npz", **(dict(np.load(folder / "gallery.npz")) | arrays))


def test_settings_may_start_with_byte_order_mark(runs: Callable[..., Path]) -> None:
    place = runs(1)
    file = next(place.glob("*/config.toml"))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors write UTF-8, and `train` reads it
    assert len(read_runs([place])[0]) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_folder_is_skipped_and_listed(damage: str, runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(4)
    broken = read_runs([place])[0][1].folder
    DAMAGES[damage](broken)
    skipped = report([place], tmp_path / "report.html")
    assert [folder for folder, _ in skipped] == [broken]
    page = (tmp_path / "report.html").read_text()
    assert "3 runs, 2 methods" in page
    assert str(broken) in page.partition('id="skipped"')[2]


def test_report_rejects_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="no finished run"):
        report([tmp_path], tmp_path / "report.html")
    with pytest.raises(UnimetricError, match="no such folder"):
        report([tmp_path / "absent"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_report_does_not_import_torch() -> None:
    code = "import sys, unimetric.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("names", [3, ["a"], None, {"seed": 3}])
def test_report_accepts_altered_labels(names: object, runs: Callable[..., Path]) -> None:
    place = runs(2)
    labels = json.loads((place / "study.json").read_text())
    (place / "study.json").write_text(json.dumps(dict.fromkeys(labels, names)))
    assert report([place], place / "page.html") == []
