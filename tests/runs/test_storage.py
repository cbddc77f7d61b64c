"""Run folders elsewhere: what is stored can always be gone on from."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import fsspec
import pytest

from unimetric.config import from_settings
from unimetric.errors import UnimetricError
from unimetric.runs.storage import Mirror, finished, list_files, local_copies, on_disk, pull, read, remove, write
from unimetric.studies.worker import work


@pytest.fixture
def place() -> str:
    files = fsspec.filesystem("memory")
    files.store.clear()
    return "memory://bucket/study"


def test_a_run_on_far_storage_is_pulled_gone_on_with_and_pushed(grid: Path, place: str) -> None:
    import tomllib

    settings = tomllib.loads(grid.read_text()) | {"seed": 0, "loss": "margin"}
    run_id = from_settings(settings).run_id
    assert on_disk(place) is None
    assert not finished(place, run_id)
    work(settings, place, pictures=False, seconds=0.1)
    assert finished(place, run_id)
    assert not finished(place, run_id, pictures=True)
    before = read(place, f"{run_id}/metrics.jsonl")
    assert before is not None
    work(settings, place)  # finished: only the pictures are missing
    assert finished(place, run_id, pictures=True)
    assert read(place, f"{run_id}/metrics.jsonl") == before
    with local_copies([place]) as folders:
        names = {path.name for path in folders[0].rglob("*") if path.is_file()}
    assert {"config.toml", "metrics.jsonl", "done", "environment.json", "gallery.npz"} <= names
    assert not any(name.endswith(".safetensors") for name in names)


def test_the_stored_checkpoint_is_never_newer_than_what_lies_beside_it(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / "checkpoint.safetensors").write_text("after 1")

    class Meddling(Mirror):
        """The run goes on while it is copied."""

        def _send(self, path: Path, name: str) -> None:
            super()._send(path, name)
            if name == "metrics.jsonl":
                newer = folder / "newer"
                newer.write_text("after 2")
                newer.replace(folder / "checkpoint.safetensors")

    Meddling(folder, place).copy()
    assert read(place, "checkpoint.safetensors") == b"after 1"
    assert read(place, "metrics.jsonl") == b"1\n"
    Mirror(folder, place).copy()
    pull(place, tmp_path / "back")
    assert (tmp_path / "back" / "checkpoint.safetensors").read_text() == "after 2"
    assert not list((tmp_path / "back").glob(".*"))


def test_a_moment_without_network_does_not_end_the_copies(tmp_path: Path, place: str, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text("1\n")
    there = threading.Event()

    class Shaky(Mirror):
        """The first copy fails."""

        failed = False

        def copy(self) -> None:
            if not self.failed:
                self.failed = True
                raise OSError("no route to host")
            super().copy()
            there.set()

    with Shaky(tmp_path, place, seconds=0.01):
        assert there.wait(10)
        assert read(place, "metrics.jsonl") == b"1\n"
    assert "no route to host" in capfd.readouterr().err


def test_done_comes_last(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("done", "checkpoint.safetensors", "metrics.jsonl", "model.safetensors"):
        (folder / name).write_text(name)
    sent: list[str] = []

    class Listening(Mirror):
        def _send(self, path: Path, name: str) -> None:
            sent.append(name)
            super()._send(path, name)

    with Listening(folder, place, seconds=1000):
        pass
    assert sent == ["metrics.jsonl", "model.safetensors", "checkpoint.safetensors", "done"]


def test_small_files(place: str) -> None:
    assert read(place, "study.json") is None
    write(place, "study.json", b"{}")
    assert read(place, "study.json") == b"{}"


def test_a_small_file_on_a_disk_is_the_old_one_or_the_new_one(tmp_path: Path, small_disk) -> None:
    place = str(tmp_path / "study")
    write(place, "study.json", b"{}")
    with small_disk(), pytest.raises(UnimetricError, match=r"study\.json: cannot be written"):
        write(place, "study.json", b" " * 9000)
    assert read(place, "study.json") == b"{}"
    assert len(list((tmp_path / "study").iterdir())) == 1


def test_remote_storage_requires_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnimetricError, match="requires fsspec") as error:
        read("s3://bucket/study", "study.json")
    assert error.value.hint == "pip install 'unimetric[storage]'"
    write(str(tmp_path), "study.json", b"{}")
    assert read(f"file://{tmp_path}", "study.json") == b"{}"  # folders of this machine do not need it
    assert on_disk(f"file://{tmp_path}") == tmp_path


@pytest.mark.parametrize("remote", [False, True])
def test_files_are_listed_and_removed(tmp_path: Path, remote: bool) -> None:
    place = "memory://some/shards" if remote else str(tmp_path / "shards")
    assert list_files(place) == set()
    write(place, "a", b"1")
    write(place, "b", b"2")
    assert list_files(place) == {"a", "b"} and read(place, "b") == b"2"
    remove(place, "a")
    remove(place, "a")  # it is gone
    assert list_files(place) == {"b"}
    remove(place, "b")


def test_local_copies_name_an_empty_address() -> None:
    """The temporary copy of a remote folder means nothing to the user."""
    with pytest.raises(UnimetricError, match=r"^memory://nothing/here: no such folder"), local_copies(["memory://nothing/here"]):
        pass
