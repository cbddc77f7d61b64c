"""A study on this machine: its runs one after another, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from unimetric.bench.board import Board
from unimetric.bench.grid import Run
from unimetric.bench.storage import absolute, finished, on_disk, read, write
from unimetric.bench.worker import work_apart
from unimetric.errors import Interrupted, UnimetricError

#: A run that fails is tried once more, and then left.
TRIES = 2


def study(runs: list[Run], out: str | Path, *, pictures: bool = True, quiet: bool = False) -> dict[str, str]:
    """Run what is not finished yet. Run folders are `OUT/<id>`, what a process said is `OUT/logs/<id>.txt`.

    Args:
        runs: see `grid.read_grid`.
        out: the study's folder; its runs may be half-done from an earlier time.
        pictures: have each run leave what a report shows of its embedding.
        quiet: show nothing.

    Returns:
        the state of each run: `done` or `failed`.
    """
    place = absolute(out)
    if on_disk(place) is None:
        raise UnimetricError(f"{out}: is no folder of this machine", "name a folder, or run the study on a cluster with `--ray`")
    logs = Path(place) / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be made: {error.strerror}", "choose another --out") from None
    remember(runs, place)
    with Board(runs, place, quiet=quiet) as board:
        for run in begin(runs, place, board, pictures=pictures):
            run_id = run.config.run_id
            for attempt in range(1, TRIES + 1):
                board.set(run_id, "running", f"attempt {attempt}" if attempt > 1 else "")
                _process(run, place, logs / f"{run_id}.txt", pictures=pictures, watch=board.show)
                if finished(place, run_id):
                    break
            said = _last_line(logs / f"{run_id}.txt")
            board.set(run_id, *(("done", "") if finished(place, run_id) else ("failed", said)))
        if not quiet:
            board.console.print(f"{board.summary()}; see {out}, or make a page of it: unimetric report {out}", soft_wrap=True, markup=False)
        return dict(board.states)


def begin(runs: list[Run], place: str, board: Board, *, pictures: bool) -> list[Run]:
    """The runs that are not finished; the others are shown as done."""
    todo = []
    for run in runs:
        if finished(place, run.config.run_id, pictures=pictures):
            board.set(run.config.run_id, "done")
        else:
            todo.append(run)
    return todo


def remember(runs: list[Run], place: str) -> None:
    """Leave what the grid calls its runs, for the report; beside what was there of another grid."""
    try:
        before = json.loads(read(place, "study.json") or b"{}")
    except ValueError:
        before = {}
    before = before if isinstance(before, dict) else {}
    write(place, "study.json", json.dumps(before | {run.config.run_id: run.labels for run in runs}, indent=1).encode())


def _process(run: Run, place: str, log: Path, *, pictures: bool, watch: Callable[[], None]) -> None:
    # Forked from a process that has imported torch and nothing else: a run is a process of its own, and begins at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unimetric.engine.train", "unimetric.engine.look"])
    child = context.Process(target=work_apart, args=(asdict(run.config), place, str(log), pictures))
    child.start()
    try:
        while child.is_alive():
            watch()
            child.join(0.2)
    except KeyboardInterrupt:
        child.terminate()  # harmless if the terminal's signal has reached the child already: it saves and stops
        child.join(60)
        raise Interrupted("the run is saved; the same command goes on with it") from None
    finally:
        if child.is_alive():
            child.kill()
            child.join()


def _last_line(log: Path) -> str:
    if not log.exists():
        return "its process ended before it began"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line.split(":")[0]]
    return (errors or lines or ["nothing was said"])[-1].strip() + f"   (see {log})"
