"""A study that is killed goes on; one run's trouble is no other's; a cluster gives the same results and may lose a worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from unimetric.errors import UnimetricError
from unimetric.runs.storage import local_copies, read
from unimetric.studies.cluster import study_on_ray
from unimetric.studies.grid import expand, read_grid
from unimetric.studies.local import save_run_labels, study
from unimetric.training.loop import train


def wait_for(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def numbers(place: Path) -> dict[str, dict[str, float]]:
    """What each finished run measured."""
    lines = {done.parent.name: json.loads(done.read_text()) for done in place.glob("*/done")}
    return {run_id: {key: value for key, value in line.items() if key.startswith("test/")} for run_id, line in lines.items()}


STUDY = """
import sys
from unimetric.studies.grid import read_grid
from unimetric.studies.local import study
study(read_grid(sys.argv[1]), sys.argv[2])
"""


def test_a_killed_study_goes_on_and_repeats_nothing(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    grid.write_text(grid.read_text().replace('"margin", "multi_similarity", "triplet", "contrastive"', '"margin", "triplet"'))
    assert len(read_grid(grid)) == 4
    out = tmp_path / "runs"
    first = subprocess.Popen([sys.executable, "-c", STUDY, str(grid), str(out)], stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list(out.glob("*/done"))) >= 2 or first.poll() is not None)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))  # nobody is left behind
    finished = {done.parent.name: done.stat().st_mtime_ns for done in out.glob("*/done")}
    assert 2 <= len(finished) < 4

    states = study(read_grid(grid), out)
    said = capsys.readouterr().out
    after = {done.parent.name: done.stat().st_mtime_ns for done in out.glob("*/done")}
    assert states == dict.fromkeys(after, "done")
    assert len(after) == 4
    assert all((out / run_id / "gallery.npz").exists() for run_id in after)
    assert after.items() >= finished.items()  # what was done was not touched
    again = [line.split()[1] for line in said.splitlines() if line.startswith("running")]
    assert 4 - len(finished) <= len(again) <= 4 - len(finished) + 1  # one may have been done, and its pictures not
    assert "4 done" in said
    assert json.loads((out / "study.json").read_text()).keys() == after.keys()


def test_a_run_that_fails_is_tried_twice_and_left(grid: Path, tmp_path: Path) -> None:
    settings = tomllib.loads(grid.read_text()) | {"loss": "margin", "seed": 0}
    datasets = [f"folder(root='{tmp_path / 'absent'}')", settings["dataset"]]
    runs = expand(settings | {"dataset": datasets})
    states = study(runs, tmp_path / "runs", pictures=False, quiet=True)
    assert [states[run.config.run_id] for run in runs] == ["failed", "done"]
    log = (tmp_path / "runs" / "logs" / f"{runs[0].config.run_id}.txt").read_text()
    assert log.count("error: ") == 2
    assert "absent" in log


def test_a_cluster_gives_the_same_results_and_may_lose_a_worker(grid: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from unimetric.studies.cluster import study_on_ray

    runs = read_grid(grid, seed=0, epochs=6)[:2]  # long enough for the killer to find a worker on a busy machine
    for run in runs:
        train(run.config, tmp_path / "here" / run.config.run_id, quiet=True)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    killed: list[int] = []
    out = tmp_path / "there"

    def kill_one() -> None:
        """The first worker that has begun a run and not finished it."""
        end = time.monotonic() + 120
        while not killed and time.monotonic() < end:
            for folder in out.glob("*/metrics.jsonl"):
                if not (folder.parent / "done").exists():
                    for process in psutil.process_iter(["cmdline"]):
                        if "ray::work" in " ".join(process.info["cmdline"] or []) and not killed and _ours(process):
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(process.pid, signal.SIGKILL)
                                killed.append(process.pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    try:
        there = study_on_ray(runs, out, pictures=False, quiet=True)
    finally:
        killed.append(0)
        killer.join()
        ray.shutdown()
    assert killed[0] > 0, "no worker was caught at work"
    assert there == {run.config.run_id: "done" for run in runs}
    assert numbers(tmp_path / "here") == numbers(out) and len(numbers(out)) == len(runs)


def _ours(process: psutil.Process) -> bool:
    me = os.getpid()
    return any(parent.pid == me for parent in process.parents())


def test_a_study_json_that_is_no_table_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("[]")
    save_run_labels(expand({"seed": [0, 1]}), str(tmp_path))
    assert [labels["seed"] for labels in json.loads((tmp_path / "study.json").read_text()).values()] == ["0", "1"]


def test_studies_that_start_at_once_keep_the_labels_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_slowly(place: str, name: str) -> bytes | None:
        data = read(place, name)
        time.sleep(0.1)
        return data

    monkeypatch.setattr("unimetric.studies.local.read", read_slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: save_run_labels(expand({"seed": [seed]}), str(tmp_path)), range(4)))
    assert len(json.loads((tmp_path / "study.json").read_text())) == 4


def test_a_study_here_has_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, says in (
        ("memory://bucket/study", "must be a folder of this machine"),
        ("nowhere://study", "`--out` must be a folder of this machine, got nowhere://study"),
    ):
        with pytest.raises(UnimetricError, match=says):
            study(expand({"seed": [0]}), place, quiet=True)
    assert not list(tmp_path.iterdir())


def test_storage_that_is_not_known_is_named() -> None:
    with pytest.raises(UnimetricError, match="nowhere://study: cannot be reached"), local_copies(["nowhere://study"]):
        pass


@pytest.mark.parametrize("execute", [study, study_on_ray])
def test_run_folder_is_not_a_folder_of_a_study(grid: Path, tmp_path: Path, execute: Callable[..., object]) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "config.toml").write_text("")
    with pytest.raises(UnimetricError, match="`--out` must not be a run folder") as caught:
        execute(read_grid(grid), f"{out}/")
    assert caught.value.hint == f"use `--out {out}_study`"
    assert [path.name for path in out.iterdir()] == ["config.toml"]


ONCE = """
from unimetric.datasets.glyphs import glyphs
from unimetric.errors import UnimetricError

calls = []

def once():
    calls.append(1)
    if len(calls) > 1:
        raise UnimetricError("the disk has gone")
    return glyphs(blocks="shapes")
"""


def test_missing_gallery_of_a_finished_run_is_named(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "once.py").write_text(ONCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "once")
    runs = read_grid(grid, dataset="once.once", seed=0, loss="margin")
    assert list(study(runs, tmp_path / "runs").values()) == ["done"]
    assert "no gallery.npz: error: the disk has gone" in capsys.readouterr().out
