"""Several runs of a study at once: how many start, on which device, and that none harms another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from unimetric.config import RunConfig
from unimetric.errors import Interrupted
from unimetric.runs import display, storage
from unimetric.studies import local as studies
from unimetric.studies import parallel
from unimetric.studies.grid import Run, expand, read_grid
from unimetric.studies.local import study
from unimetric.studies.parallel import Slots

UNIMETRIC = [sys.executable, "-m", "unimetric.cli"]


def fill(slots: Slots, *, count: int = 20) -> list[int]:
    """Take every free slot for one more run, and return their devices."""
    taken: list[int] = []
    while len(taken) < count and (device := slots.find()) is not None:
        slots.used[f"run {len(slots.used)}"] = device
        taken.append(device)
    return taken


def gpus(monkeypatch: pytest.MonkeyPatch, *free: float) -> None:
    monkeypatch.setattr(parallel, "on_gpu", lambda config: config.device != "cpu")
    monkeypatch.setattr(parallel, "visible_gpus", lambda: [str(index) for index in range(len(free))])
    monkeypatch.setattr(parallel, "free_gpu_memory", lambda: list(free))


@pytest.mark.parametrize(("peak", "most"), [(12.0, 4), (40.0, 3), (41.5, 2), (200.0, 1)])
def test_auto_fills_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, peak: float, most: int) -> None:
    gpus(monkeypatch, 139.0)
    slots = Slots([RunConfig(seed=seed) for seed in range(20)], "auto")
    assert fill(slots) == [0]  # the first run alone, until it has reported its memory
    slots.peak = peak
    assert len(fill(slots)) == most - 1
    assert slots.threads == 0
    assert slots.name_gpu(RunConfig(), 0) == ""


def test_auto_uses_every_gpu_by_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 139.0, 30.0)
    slots = Slots([RunConfig(seed=seed) for seed in range(20)], "auto")
    assert fill(slots) == [0]
    slots.peak = 12.0
    assert sorted(fill(slots)) == [0, 0, 0, 1, 1]
    assert [slots.name_gpu(RunConfig(), device) for device in (0, 1)] == ["0", "1"]
    assert slots.name_gpu(RunConfig(device="cuda:2"), 1) == ""
    alone = Slots([RunConfig(device="cuda:2"), RunConfig(seed=1)], "auto")
    alone.peak = 1.0
    assert len(fill(alone)) == 1  # a run on several GPUs uses the machine alone


def test_auto_uses_two_cores_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(parallel, "count_cores", lambda: 8)
    monkeypatch.setattr(parallel, "free_memory", lambda: 100.0)
    configs = [RunConfig(seed=seed, device="cpu") for seed in range(20)]
    slots = Slots(configs, "auto")
    assert (fill(slots), slots.threads) == ([0], 2)
    slots.peak = 1.0
    assert len(fill(slots)) == 3
    slots = Slots(configs, "auto")
    slots.peak = 31.0
    assert len(fill(slots)) == 2  # 62 of 90 GiB
    assert [Slots(configs[:count], "auto").threads for count in (2, 1)] == [4, 8]
    assert (len(fill(Slots(configs, 3))), Slots(configs, 3).threads) == (3, 2)
    assert (len(fill(Slots(configs, 1))), Slots(configs, 1).threads) == (1, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert Slots(configs, 3).threads == 0


def test_free_memory_and_cores_are_those_of_the_machine() -> None:
    assert 0 < parallel.free_memory() <= psutil.virtual_memory().total / 2**30
    assert 1 <= parallel.count_cores() <= (os.cpu_count() or 1)


def settings(grid: Path, **changed: object) -> dict:
    return tomllib.loads(grid.read_text()) | {"loss": "margin", "seed": 0} | changed


def test_parallel_runs_match_serial_runs(grid: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """One of them cannot read its dataset: it fails alone."""
    absent = f"folder(root='{tmp_path / 'absent'}')"
    good = settings(grid)["dataset"]
    lines = [line for line in grid.read_text().splitlines() if not line.startswith(("dataset", "loss", "seed"))]
    grid.write_text("\n".join([*lines, f'dataset = ["{good}", "{absent}"]', 'loss = "margin"', "seed = [0, 1]"]))
    runs = read_grid(grid)
    out = tmp_path / "two"
    found = subprocess.run([*UNIMETRIC, "bench", str(grid), "--out", str(out), "--parallel", "2"], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    events = [line.split() for line in found.stdout.splitlines()]
    assert [words[0] for words in events[:2]] == ["running", "running"]
    failed = [line for line in found.stdout.splitlines() if line.startswith("failed")]
    assert len(failed) == 2 and all("error: " in line and "absent" in line and "(see " in line for line in failed)
    assert "2 done, 2 failed" in found.stdout

    one = [run for run in runs if run.config.dataset == good]
    assert study(one, tmp_path / "one", pictures=False, quiet=True) == {run.config.run_id: "done" for run in one}
    for run in one:
        lines = [json.loads((tmp_path / name / run.config.run_id / "done").read_text()) for name in ("one", "two")]
        values = [{key: value for key, value in line.items() if key.startswith("test/")} for line in lines]
        assert values[0] == values[1] and values[0]
        assert all(0.05 < line["peak_memory_gib"] < 64 for line in lines)
        environment = json.loads((out / run.config.run_id / "environment.json").read_text())
        assert environment["peak_memory_gib"] >= lines[1]["peak_memory_gib"]

    again = {done: done.stat().st_mtime_ns for done in out.glob("*/done")}
    assert set(study(one, out, parallel=2, quiet=True).values()) == {"done"}  # finished runs are skipped
    assert again == {done: done.stat().st_mtime_ns for done in out.glob("*/done")}


def test_auto_waits_for_the_first_peak(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "count_cores", lambda: 4)
    known: list[float] = []
    start = studies._start

    def watched(run: Run, place: str, **options: object) -> object:
        known.append(max(studies._peak(place, each.config.run_id) for each in runs))
        return start(run, place, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(studies, "_start", watched)
    runs = expand(settings(grid, seed=[0, 1], epochs=3))
    states = study(runs, tmp_path / "runs", parallel="auto", pictures=False, quiet=True)
    assert set(states.values()) == {"done"}
    assert known[0] == 0.0 and known[1] > 0.05


KILLER = """
import os, signal
from unimetric.datasets.glyphs import glyphs

def deadly(*, victim: bool = False):
    if victim:
        print("about to end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return glyphs(blocks="shapes")
"""


def test_a_killed_run_takes_no_other_with_it(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "killer")
    runs = expand(settings(grid, dataset=["killer.deadly(victim=True)", "killer.deadly()"], seed=[0, 1]))
    monkeypatch.setattr(display, "EVERY", 0.0)
    states = study(runs, tmp_path / "runs", parallel=3, pictures=False)
    assert [states[run.config.run_id] for run in runs] == ["failed", "failed", "done", "done"]
    out, err = capsys.readouterr()
    assert "epochs 0/4  3 running, 1 waiting\n" in err  # the first progress line
    said = [line for line in out.splitlines() if line.startswith("failed")]
    assert len(said) == 2 and all("ended by signal 9 (Killed), last output: about to end" in line for line in said)


def test_memory_trouble_lowers_the_number_of_runs(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that the system kills for memory counts as one too many."""
    (tmp_path / "killer.py").write_text(KILLER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "killer")
    monkeypatch.setattr(parallel, "count_cores", lambda: 8)
    slots: list[Slots] = []
    original = Slots.__init__

    def made(self: Slots, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        self.peak = 0.1
        slots.append(self)

    monkeypatch.setattr(Slots, "__init__", made)
    runs = expand(settings(grid, dataset=["killer.deadly()", "killer.deadly(victim=True)"], epochs=2))
    states = study(runs, tmp_path / "runs", parallel="auto", pictures=False, quiet=True)
    assert [states[run.config.run_id] for run in runs] == ["done", "failed"]
    assert slots[0].most == 1


def test_ctrl_c_saves_every_run(grid: Path, tmp_path: Path) -> None:
    grid.write_text(grid.read_text().replace("epochs = 1", "epochs = 2000"))
    out = tmp_path / "runs"
    words = [*UNIMETRIC, "bench", str(grid), "loss=margin", "--out", str(out), "--parallel", "2"]
    bench = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell starts tests in the background without it
    )
    end = time.monotonic() + 200
    while len(list(out.glob("*/checkpoint.safetensors"))) < 2:
        assert bench.poll() is None and time.monotonic() < end, bench.communicate()
        time.sleep(0.1)
    children = psutil.Process(bench.pid).children(recursive=True)
    bench.send_signal(signal.SIGINT)  # to this process alone: it stops the others
    said, errors = bench.communicate(timeout=120)
    assert bench.returncode == 130, errors
    assert "stopped: the runs are saved; run the same command to resume them" in errors
    assert sum(line.startswith("stopped") for line in said.splitlines()) == 2
    assert not list(out.glob("*/done"))
    logs = [log.read_text() for log in (out / "logs").glob("*.txt")]
    assert len(logs) == 2 and all("stopped: saved" in log for log in logs)
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.1)


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["process", "group"])
def test_sigterm_saves_a_streamed_run_and_ends_workers(grid: Path, tmp_path: Path, send: Callable[[int, int], None]) -> None:
    """A scheduler sends the signal to the main process, or to all processes."""
    out = tmp_path / "runs"
    words = [*UNIMETRIC, "bench", str(grid), "loss=margin", "seed=0", "epochs=2000", "residence=stream", "workers=2", "--out", str(out)]
    bench = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 200
    children: list[psutil.Process] = []
    parents: dict[int, int] = {}
    try:
        while not list(out.glob("*/checkpoint.safetensors")) or len(parents) < 5:  # resource tracker, fork server, run, two workers
            assert bench.poll() is None and time.monotonic() < end, bench.communicate()
            with suppress(psutil.NoSuchProcess):  # workers of the epoch before
                children = psutil.Process(bench.pid).children(recursive=True)
                parents = {child.pid: child.ppid() for child in children}
        send(bench.pid, signal.SIGTERM)
        errors = bench.communicate(timeout=120)[1]
    finally:
        bench.kill()
        left = psutil.wait_procs(children, timeout=20)[1]
        for each in left:
            each.kill()
    assert not left
    assert bench.returncode == 130, errors
    assert "stopped: the runs are saved; run the same command to resume them" in errors
    assert "stopped: saved" in next((out / "logs").glob("*.txt")).read_text()
    run = parents[children[-1].pid]
    assert parents[parents[run]] == bench.pid, "a fork server of the run starts its workers, each with another import of torch"


def test_signal_at_the_end_of_a_study_stops_it(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search starts a study per trial, and would continue with the next one."""

    def finished(place: str, run_id: str, **options: bool) -> bool:
        done = storage.finished(place, run_id, **options)
        if done:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(studies, "finished", finished)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="run the same command"):
        study(read_grid(grid)[:1], tmp_path / "runs", pictures=False, quiet=True)
    assert signal.getsignal(signal.SIGTERM) == before
