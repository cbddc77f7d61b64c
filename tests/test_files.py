"""Files are whole or not there, on a real disk with a real limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.files import atomic, check_writable, read_arrays, wait_for_lock, write_bytes, write_text


def test_a_file_and_its_folder_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "a.txt", "ä\n")
    write_bytes(tmp_path / "new" / "b", b"\0")
    assert (tmp_path / "new" / "a.txt").read_text(encoding="utf-8") == "ä\n"
    assert (tmp_path / "new" / "b").read_bytes() == b"\0"
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_what_was_before_stays_where_there_is_no_room(tmp_path: Path, small_disk) -> None:
    write_text(tmp_path / "a.txt", "before")
    with small_disk(), pytest.raises(UnimetricError, match=r"a\.txt: cannot be written: File too large\n\nhint: free some space"):
        write_text(tmp_path / "a.txt", "after" * 2000)
    assert (tmp_path / "a.txt").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_was_before_stays_when_the_writer_fails(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "before")
    with pytest.raises(ZeroDivisionError), atomic(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        1 / 0  # noqa: B018
    assert (tmp_path / "a.txt").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_place_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.txt", tmp_path):
        with pytest.raises(UnimetricError, match=f"{path}: cannot be written") as caught:
            write_text(path, "a")
        assert caught.value.hint == "use another path, which you can write to"


def test_check_writable_finds_errors_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnimetricError, match=r"a\.txt: cannot be written: Not a directory"):
        check_writable(tmp_path / "file" / "a.txt")
    with pytest.raises(UnimetricError, match="is a folder"):
        check_writable(tmp_path)
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "a.txt")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_read_arrays_does_not_suggest_pickle(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    file.write_text("no zip")
    with pytest.raises(UnimetricError, match=r"a\.npz: must be an intact \.npz file: not a zip archive, or incomplete"):
        read_arrays(file, "")


def test_a_file_is_written_without_torch() -> None:
    code = "import sys, unimetric.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_locks_are_skipped_without_fcntl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unimetric.files.fcntl", None)  # as on Windows
    with wait_for_lock(tmp_path / "logs" / "run.lock"):
        assert not (tmp_path / "logs").exists()


def test_object_arrays_have_a_hint_that_helps(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", labels=np.array(["boot", "clog"], dtype=object))
    with pytest.raises(UnimetricError, match="Object arrays") as caught:
        read_arrays(tmp_path / "a.npz", "name another file")
    assert "dtype=str" in caught.value.hint
