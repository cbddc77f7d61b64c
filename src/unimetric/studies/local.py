"""Execute a study on this machine, each run in its own process.

Runs are executed one after another or several at once.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from unimetric.errors import Interrupted, UnimetricError
from unimetric.files import make_folder, wait_for_lock
from unimetric.runs.storage import absolute, finished, on_disk, read, write
from unimetric.spec import trusted
from unimetric.studies.board import Board, last_line
from unimetric.studies.grid import Run
from unimetric.studies.parallel import Slots
from unimetric.studies.worker import work_apart

if TYPE_CHECKING:
    from unimetric.training.signals import Signals

#: Number of attempts per run.
TRIES = 2


def study(runs: list[Run], out: str | Path, *, parallel: int | str = 1, pictures: bool = True, quiet: bool = False) -> dict[str, str]:
    """Execute the runs that are not finished.

    Run folders are `OUT/<id>`. The output of each process is appended to `OUT/logs/<id>.txt`.

    Args:
        runs: Runs of `grid.read_grid`.
        out: Folder of the study. Unfinished runs in it are resumed.
        parallel: Number of runs at once, or `auto`; see `parallel.Slots`.
        pictures: Whether each run saves what a report shows of its embedding.
        quiet: Whether to print nothing.

    Returns:
        State of each run by id: `done` or `failed`.
    """
    from unimetric.training.signals import Signals

    place = absolute(out)
    if on_disk(place) is None:
        raise UnimetricError(f"`--out` must be a folder of this machine, got {out}", "name a folder, or use a cluster with `--ray`")
    check_study_folder(out)
    make_folder(Path(place) / "logs")
    save_run_labels(runs, place)
    with Signals() as signals, Board(runs, place, quiet=quiet) as board:
        execute(begin(runs, place, board, pictures=pictures), place, board, signals, parallel=parallel, pictures=pictures)
        if not quiet:
            command = f"unimetric report {quote(str(out))}"
            board.console.print(f"{board.summary()}; see {out}, or write a report: {command}", soft_wrap=True, markup=False)
        return dict(board.states)


@dataclass(frozen=True)
class _Child:
    """Process of a run, and the size of its log before it started."""

    run: Run
    process: BaseProcess
    log: Path
    logged: int


def execute(runs: list[Run], place: str, board: Board, signals: Signals, *, parallel: int | str, pictures: bool) -> None:
    """Execute runs in separate processes, and show their states.

    A run that fails is tried again; it does not stop the others. Ctrl-C and SIGTERM stop all of them with their checkpoints.

    Args:
        runs: Unfinished runs.
        place: Folder of the study.
        board: Display of the states.
        signals: Handler of the signals that stop the study.
        parallel: Number of runs at once, or `auto`.
        pictures: Whether each run saves what a report shows of its embedding.
    """
    if not runs:
        return
    slots = Slots([run.config for run in runs], parallel)
    waiting, tries = list(runs), Counter[str]()
    active: dict[str, _Child] = {}
    try:
        while (waiting or active) and not signals.requested:
            device = slots.find() if waiting else None
            if device is not None:
                run = waiting.pop(0)
                run_id = run.config.run_id
                tries[run_id] += 1
                slots.used[run_id] = device
                board.set(run_id, "running", f"attempt {tries[run_id]}" if tries[run_id] > 1 else "")
                active[run_id] = _start(run, place, gpu=slots.name_gpu(run.config, device), threads=slots.threads, pictures=pictures)
                continue
            wait([child.process.sentinel for child in active.values()], timeout=0.2)
            board.show()
            if slots.auto and waiting:
                slots.peak = max([slots.peak, *(_peak(place, run_id) for run_id in active)])
            for run_id in [run_id for run_id, child in active.items() if not child.process.is_alive()]:
                child = active.pop(run_id)
                del slots.used[run_id]
                if finished(place, run_id):
                    slots.peak = max(slots.peak, _peak(place, run_id))
                    board.set(run_id, "done", f"no gallery.npz: {_reason(child)}" if child.process.exitcode else "")
                    continue
                reason = _reason(child)
                if slots.auto and (child.process.exitcode == -signal.SIGKILL or "out of memory" in reason):
                    slots.most = max(1, len(active))
                if tries[run_id] < TRIES:
                    waiting.insert(0, child.run)
                    board.states[run_id] = "waiting"
                else:
                    board.set(run_id, "failed", reason)
        if signals.requested:  # also if the last run has ended meanwhile, because a search would start another one
            _stop(active, board)
            raise Interrupted("the runs are saved; run the same command to resume them")
    finally:
        for child in active.values():
            if child.process.is_alive():
                child.process.kill()
                child.process.join()


def begin(runs: list[Run], place: str, board: Board, *, pictures: bool) -> list[Run]:
    """Return the runs that are not finished, and show the others as done.

    Args:
        runs: All runs of the study.
        place: Folder of the study.
        board: Display of the states.
        pictures: Whether a finished run must have saved what a report shows of its embedding.
    """
    todo = []
    for run in runs:
        if finished(place, run.config.run_id, pictures=pictures):
            board.set(run.config.run_id, "done")
        else:
            todo.append(run)
    return todo


def check_study_folder(out: str | Path) -> None:
    """Raise an error if the folder of a study is a run folder.

    A report would show only that run.

    Args:
        out: Folder of the study, or its fsspec URL.
    """
    if read(absolute(out), "config.toml") is not None:
        raise UnimetricError(f"`--out` must not be a run folder, got {out}", f"use `--out {str(out).rstrip('/')}_study`")


def save_run_labels(runs: list[Run], place: str) -> None:
    """Add the grid's labels of the runs to `study.json`, for the report.

    Args:
        runs: Runs of the grid.
        place: Folder of the study.
    """
    folder = on_disk(place)
    with wait_for_lock(folder / "study.lock") if folder else nullcontext():  # another study may add its labels at once
        try:
            before = json.loads(read(place, "study.json") or b"{}")
        except ValueError:
            before = {}
        before = before if isinstance(before, dict) else {}
        write(place, "study.json", json.dumps(before | {run.config.run_id: run.labels for run in runs}, indent=1).encode())


def _start(run: Run, place: str, *, gpu: str, threads: int, pictures: bool) -> _Child:
    """Start the process of a run."""
    # The fork server has only imported modules, so a process starts fast and shares nothing with other runs.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unimetric.training.loop", "unimetric.analysis.gallery"])
    log = Path(place) / "logs" / f"{run.config.run_id}.txt"
    process = context.Process(target=work_apart, args=(asdict(run.config), place, str(log), pictures, gpu, threads, trusted()))
    logged = log.stat().st_size if log.exists() else 0
    process.start()
    return _Child(run, process, log, logged)


def _stop(active: dict[str, _Child], board: Board) -> None:
    """Stop the runs, and wait up to a minute until they have saved themselves."""
    for child in active.values():
        child.process.terminate()  # harmless if the child has received a signal of the terminal or a scheduler
    end = time.monotonic() + 60
    for run_id, child in active.items():
        child.process.join(max(0.0, end - time.monotonic()))
        board.set(run_id, "stopped")


def _peak(place: str, run_id: str) -> float:
    """Return the peak memory in GiB that a run has reported, or 0."""
    return last_line(place, run_id).get("peak_memory_gib", 0.0)


def _reason(child: _Child) -> str:
    """Return why a run failed: the last error or line of its log, and the signal.

    The signal is the one that ended the run, if any.
    """
    text = child.log.read_bytes()[child.logged :].decode(errors="replace") if child.log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line.split(":")[0]]
    code = child.process.exitcode or 0
    said = (errors or lines or ["no output"])[-1]
    if code < 0:
        said = f"ended by signal {-code} ({signal.strsignal(-code)}), last output: {(lines or ['none'])[-1]}"
    return f"{said}   (see {child.log})"
