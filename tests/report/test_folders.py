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


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "not finished": ("", lambda folder: (folder / "done").unlink()),
    "half a `done`": ("done", lambda folder: (folder / "done").write_text('{"epoch": 4, "test/rec')),
    "a `done` that is no table": ("done", lambda folder: (folder / "done").write_text("3")),
    "a `done` without numbers": ("done", lambda folder: (folder / "done").write_text('{"epoch": 4, "test/recall(k=1)": null}')),
    "a `done` of other kinds": ("done", lambda folder: (folder / "done").write_text('{"epoch": 4, "lower_is_better": [3]}')),
    "a huge number": ("done", lambda folder: (folder / "done").write_text('{"epoch": 4, "test/recall(k=1)": 1' + "0" * 400 + "}")),
    "a nested `done`": ("done", lambda folder: (folder / "done").write_text("[" * 100_000)),
    "raw values without numbers": ("done", lambda folder: (folder / "done").write_text('{"epoch": 4, "raw": {"test/nmi": "x"}}')),
    "a line of words": (
        "metrics.jsonl",
        lambda folder: (folder / "metrics.jsonl").write_text('{"epoch": 1, "test/recall(k=1)": "high"}\n'),
    ),
    "half a line": ("metrics.jsonl", lambda folder: (folder / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo')),
    "a line without an epoch": ("metrics.jsonl", lambda folder: (folder / "metrics.jsonl").write_text("{}\n")),
    "no settings": ("", lambda folder: (folder / "config.toml").unlink()),
    "half the settings": ("config.toml", lambda folder: (folder / "config.toml").write_text('dataset = "cub')),
    "settings in zeros": ("config.toml", lambda folder: (folder / "config.toml").write_bytes(b"\xff\x00" * 10)),
    "settings that lack some": ("config.toml", lambda folder: (folder / "config.toml").write_text("seed = 0\n")),
    "settings with a date": ("config.toml", lambda folder: (folder / "config.toml").open("a").write("when = 2026-01-01\n")),
    "settings with dates": ("config.toml", lambda folder: (folder / "config.toml").open("a").write("when = [2026-01-01]\n")),
    "nested settings": ("config.toml", lambda folder: (folder / "config.toml").write_text("seed = " + "[" * 100_000)),
}

#: Damage that costs a part of a run, not its results.
SMALL_DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "half an environment": ("environment.json", lambda folder: (folder / "environment.json").write_text('{"torch": ')),
    "an environment that is a list": ("environment.json", lambda folder: (folder / "environment.json").write_text("[1]")),
    "an empty gallery": ("gallery.npz", lambda folder: (folder / "gallery.npz").write_bytes(b"")),
    "half a gallery": ("gallery.npz", lambda folder: (folder / "gallery.npz").write_bytes((folder / "gallery.npz").read_bytes()[:900])),
    "a flipped bit in the arrays": ("gallery.npz", lambda folder: _flip(folder / "gallery.npz", 700, 3)),
    "a gallery without ends": ("gallery.npz", lambda folder: _altered(folder, ends=np.array(3))),
    "a gallery with ends outside": ("gallery.npz", lambda folder: _altered(folder, ends=np.full(24, 10**9))),
    "a gallery of flat points": ("gallery.npz", lambda folder: _altered(folder, embeddings=np.zeros(24))),
    "a gallery of infinite points": ("gallery.npz", lambda folder: _altered(folder, embeddings=np.full((24, 16), np.inf))),
    "a gallery at no distance": ("gallery.npz", lambda folder: _altered(folder, shift=np.array("far"))),
    "a gallery at two distances": ("gallery.npz", lambda folder: _altered(folder, shift=np.ones(2))),
    "a gallery that points outside": ("gallery.npz", lambda folder: _altered(folder, neighbours=np.full((3, 4), 99))),
    "a gallery with some classes": ("gallery.npz", lambda folder: _altered(folder, class_names=np.array(["a"]), class_recall=np.ones(2))),
}


def _altered(folder: Path, **arrays: np.ndarray) -> None:
    np.savez(folder / "gallery.npz", **(dict(np.load(folder / "gallery.npz")) | arrays))


def _flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte % len(data)] ^= 1 << bit
    path.write_bytes(bytes(data))


def test_one_run_is_not_plural(runs: Callable[..., Path], tmp_path: Path) -> None:
    report([runs(1)], tmp_path / "report.html")
    assert "1 run, 1 method, on" in (tmp_path / "report.html").read_text()


def test_settings_may_start_with_byte_order_mark(runs: Callable[..., Path]) -> None:
    place = runs(1)
    file = next(place.glob("*/config.toml"))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors write UTF-8, and `train` reads it
    assert len(read_runs([place])[0]) == 1


@pytest.mark.parametrize("damage", DAMAGES | SMALL_DAMAGES)
def test_damaged_file_is_named_and_skipped(damage: str, runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(4)
    broken = read_runs([place])[0][1].folder
    name, change = (DAMAGES | SMALL_DAMAGES)[damage]
    change(broken)
    skipped = report([place], tmp_path / "report.html")
    assert [path for path, _ in skipped] == [broken / name]
    page = (tmp_path / "report.html").read_text()
    assert f"{3 if damage in DAMAGES else 4} runs, 2 methods" in page
    assert str(broken / name) in page.partition('id="skipped"')[2]


def test_damaged_study_file_is_named(runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(4)
    (place / "study.json").write_text((place / "study.json").read_text()[:50])
    assert [path for path, _ in report([place], tmp_path / "report.html")] == [place / "study.json"]
    assert "4 runs, 2 methods" in (tmp_path / "report.html").read_text()


def test_random_damage_never_ends_the_report(runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(2, points=6)
    whole = tmp_path / "whole"
    shutil.copytree(place, whole)
    files = sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file())
    rng = np.random.default_rng(0)
    for number in range(120):
        file = files[number % len(files)]
        data = (whole / file).read_bytes()
        if number % 3:
            _flip(place / file, int(rng.integers(len(data))), int(rng.integers(8)))
        else:
            (place / file).write_bytes(data[: int(rng.integers(len(data)))])
        report([place], tmp_path / "report.html", galleries=2)
        (place / file).write_bytes(data)


def test_report_fails_if_every_run_is_damaged(runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(2)
    for file in place.glob("*/done"):
        file.write_text("{")
    with pytest.raises(UnimetricError, match=r"no finished run.*/done: damaged: "):
        report([place], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_report_rejects_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="no finished run"):
        report([tmp_path], tmp_path / "report.html")
    with pytest.raises(UnimetricError, match="no such folder"):
        report([tmp_path / "absent"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_raw_values_and_training_metrics_are_read(runs: Callable[..., Path]) -> None:
    place = runs(1)
    (folder,) = [path for path in place.iterdir() if path.is_dir()]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"raw": {"recall(k=1)": 0.4, "train/nmi": 0.3, "per_source/a": 1}, "train: pi_ratio": 0.5}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    (folder / "done").write_text(json.dumps(json.loads((folder / "done").read_text()) | {"train: pi_ratio": 0.75}))
    ((record,), skipped) = read_runs([place])
    assert not skipped and record.lines[0]["train/pi_ratio"] == 0.5
    assert record.value("train: pi_ratio") == 0.75
    assert record.raw == {"test/recall(k=1)": 0.4, "train/nmi": 0.3, "test/per_source/a": 1.0}
    assert record.raw_value("recall(k=1)") == 0.4 and record.raw_value("train: nmi") == 0.3


def test_report_does_not_import_torch() -> None:
    code = "import sys, unimetric.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("names", [3, ["a"], None, {"seed": 3}])
def test_report_accepts_altered_labels(names: object, runs: Callable[..., Path]) -> None:
    place = runs(2)
    labels = json.loads((place / "study.json").read_text())
    (place / "study.json").write_text(json.dumps(dict.fromkeys(labels, names)))
    assert report([place], place / "page.html") == []
