"""The commands `report` and `check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import exit_code as run


def test_report_lists_skipped_folders(runs: Callable[..., Path], tmp_path: Path, monkeypatch, capsys) -> None:
    place = runs(4)
    broken = next(path for path in sorted(place.iterdir()) if path.is_dir())
    (broken / "done").unlink()
    page = tmp_path / "new" / "page.html"
    assert run(monkeypatch, "report", str(place), "--out", str(page)) == 0
    said = capsys.readouterr()
    assert f"skipped {broken}: not finished" in said.err
    assert f"see {page}" in said.out
    assert {path.suffix for path in page.parent.iterdir()} == {".html", ".md", ".csv", ".tex"}


def test_report_rejects_empty_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    assert run(monkeypatch, "report", str(tmp_path), "--out", str(tmp_path / "page.html")) == 2
    said = capsys.readouterr().err
    assert "no finished run" in said
    assert "hint: " in said
    assert not (tmp_path / "page.html").exists()
    assert run(monkeypatch, "report", str(tmp_path / "absent"), "--embed", "--out", str(tmp_path / "page.html")) == 2
    assert "absent: no such folder" in capsys.readouterr().err


def test_report_rejects_path_of_table(runs: Callable[..., Path], tmp_path: Path, monkeypatch, capsys) -> None:
    assert run(monkeypatch, "report", str(runs(1)), "--out", str(tmp_path / "new" / "page.md")) == 2
    assert "page.html" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_report_keeps_old_file_on_full_disk(runs: Callable[..., Path], tmp_path: Path, monkeypatch, capsys, small_disk) -> None:
    page = tmp_path / "new" / "page.html"
    page.parent.mkdir()
    page.write_text("before")
    place = str(runs(1))
    with small_disk():
        code = run(monkeypatch, "report", place, "--out", str(page))
    assert code == 2 and "cannot be written" in capsys.readouterr().err
    assert page.read_text() == "before" and len(list(page.parent.iterdir())) == 1


def test_check_counts_runs_of_grid(tmp_path: Path, monkeypatch, capsys) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text("seed = [0, 1]\nloss = ['margin', 'triplet']\n")
    assert run(monkeypatch, "check", str(grid)) == 0
    assert f"{grid}: good, 4 runs" in capsys.readouterr().out
    grid.write_text("seed = [0, 1]\nloss = ['margin', 'circle']\nminer = 'semihard'\n")
    assert run(monkeypatch, "check", str(grid)) == 2
    assert "the loss Circle reads Pairs" in capsys.readouterr().err
