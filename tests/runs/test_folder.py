"""Run folders: which runs another configuration may replace."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from tests.conftest import changed

from unimetric.config import RunConfig, load
from unimetric.errors import UnimetricError
from unimetric.runs import folder as folders
from unimetric.runs.record import finished_lines
from unimetric.samplers.samples_per_class import SamplesPerClass
from unimetric.training.loop import train


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def failed(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a run that failed in its first epoch."""

    def fail(self: SamplesPerClass, step: int) -> None:
        raise UnimetricError("an image cannot be decoded")

    with monkeypatch.context() as patch:
        patch.setattr(SamplesPerClass, "batch", fail)
        with pytest.raises(UnimetricError, match="cannot be decoded"):
            train(changed(config, logger="csv"), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "model.safetensors").exists() and len(finished_lines(tmp_path / "run", 0)) == 1
    return tmp_path / "run"


def test_run_that_failed_before_epoch_1_is_replaced(config: RunConfig, failed: Path, tmp_path: Path) -> None:
    other = changed(config, on_bad_picture="skip", head="linear(dim=4)", epochs=1, evaluate_every=0)
    train(other, tmp_path / "new", quiet=True)
    train(other, failed, quiet=True)
    assert load(failed / "config.toml") == other
    assert contents(failed).keys() == contents(tmp_path / "new").keys()
    assert not (failed / "csv").exists()  # the log of the replaced run
    assert len(finished_lines(failed, 9)) == len(finished_lines(tmp_path / "new", 9)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"epoch": 0}\n{"epoch": 1}\n'),
        ("metrics.jsonl", ""),  # a copied model
        ("checkpoint.safetensors", ""),
        ("calibration.json", "{}"),
    ],
)
def test_run_with_something_to_keep_is_not_replaced(config: RunConfig, failed: Path, name: str, text: str) -> None:
    (failed / name).write_text(text)
    before = contents(failed)
    with pytest.raises(UnimetricError, match="contains another run"):
        train(changed(config, seed=1), failed, quiet=True)
    assert contents(failed) == before


def test_config_of_the_user_is_not_replaced(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config.dump())
    with pytest.raises(UnimetricError, match="contains another run"):
        train(changed(config, seed=1), tmp_path, quiet=True)
    assert (tmp_path / "config.toml").read_text() == config.dump()


LOCK = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_run_of_another_process_is_not_replaced(config: RunConfig, failed: Path) -> None:
    words = [sys.executable, "-c", LOCK, str(failed / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        before = contents(failed)
        with pytest.raises(UnimetricError, match="another process is training in it"):
            train(changed(config, seed=1), failed, quiet=True)
        assert contents(failed) == before
        other.communicate()


def test_run_without_locks_is_not_replaced(config: RunConfig, failed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "lockf", lack)
    before = contents(failed)
    with pytest.raises(UnimetricError, match="contains another run"):
        train(changed(config, seed=1), failed, quiet=True)
    assert contents(failed) == before
    train(changed(config, epochs=3), failed, quiet=True)  # the same run


def test_run_that_trained_meanwhile_is_not_replaced(config: RunConfig, failed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = folders._is_replaceable
    monkeypatch.setattr(folders, "_is_replaceable", lambda folder: check(folder) and not (folder / ".lock").exists())
    with pytest.raises(UnimetricError, match="contains another run"):
        train(changed(config, seed=1), failed, quiet=True)


def test_lock_that_its_owner_has_removed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folders.fcntl.lockf

    def lock_late(file: IO[bytes], flags: int) -> None:
        (tmp_path / ".lock").unlink()  # as the end of another run does, between opening and locking here
        lock(file, flags)

    monkeypatch.setattr(folders.fcntl, "lockf", lock_late)
    with pytest.raises(UnimetricError, match="another process is training in it"), folders.lock_folder(tmp_path):
        pytest.fail("two processes may hold the lock")
