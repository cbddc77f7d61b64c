"""A study on a Ray cluster: one run for each GPU, or for a share of one. Ray starts, places and restarts; we only say what."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from unimetric.errors import Interrupted, UnimetricError
from unimetric.runs.cluster import import_ray
from unimetric.runs.storage import absolute, finished, read
from unimetric.studies.board import Board
from unimetric.studies.grid import Run
from unimetric.studies.local import TRIES, begin, save_run_labels
from unimetric.studies.worker import work


def study_on_ray(
    runs: list[Run],
    out: str | Path,
    *,
    address: str = "auto",
    gpus: float = 0.0,
    cpus: float = 1.0,
    pictures: bool = True,
    quiet: bool = False,
) -> dict[str, str]:
    """Run what is not finished yet on a Ray cluster. A worker that is lost costs what it did since its last checkpoint, and nothing else.

    Args:
        runs: see `grid.read_grid`.
        out: the study's folder, which every machine must reach: a shared disk, or what fsspec reaches, such as `s3://bucket/study`.
        address: of the cluster; `auto` finds the one of this machine, `local` starts one here.
        gpus: GPUs a run; 0.5 puts two runs on one.
        cpus: cores a run.
        pictures: have each run leave what a report shows of its embedding.
        quiet: show nothing.

    Returns:
        the state of each run: `done` or `failed`.
    """
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except ConnectionError as error:
        raise UnimetricError(f"no Ray cluster at {address!r}: {error}", "start one with `ray start --head`, or use `--ray local`") from None
    # A process for one run only: nothing of a run is left in the next one's. A lost process or machine is Ray's to replace; what the
    # run itself raises is counted here.
    task = ray.remote(max_calls=1, num_gpus=gpus, num_cpus=cpus, max_retries=3)(work)
    place = absolute(out)
    save_run_labels(runs, place)
    waiting: dict[Any, Run] = {}
    tries: dict[str, int] = {}

    def submit(run: Run) -> None:
        tries[run.config.run_id] = tries.get(run.config.run_id, 0) + 1
        waiting[task.remote(asdict(run.config), place, pictures=pictures)] = run

    with Board(runs, place, quiet=quiet) as board:
        for run in begin(runs, place, board, pictures=pictures):
            submit(run)
        try:
            while waiting:
                ready, _ = ray.wait(list(waiting), timeout=1.0)
                for reference in ready:
                    run = waiting.pop(reference)
                    said = _failure(ray, reference)
                    if finished(place, run.config.run_id):
                        board.set(run.config.run_id, "done")
                    elif tries[run.config.run_id] < TRIES:
                        submit(run)
                    else:
                        board.set(run.config.run_id, "failed", said or "it left no `done`")
                for run in waiting.values():  # a run has begun when its folder is there
                    if board.states[run.config.run_id] == "waiting" and read(place, f"{run.config.run_id}/config.toml"):
                        board.set(run.config.run_id, "running")
                board.show()
        except KeyboardInterrupt:
            for reference in waiting:
                ray.cancel(reference)  # interrupts the run, which then saves itself as after Ctrl-C
            ray.wait(list(waiting), num_returns=len(waiting), timeout=60.0)
            raise Interrupted("the runs are saved; run the same command to resume them") from None
        return dict(board.states)


def _failure(ray: Any, reference: Any) -> str:
    """Why a task failed, in one line; empty if it did not."""
    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[-1].strip() if lines else type(error).__name__
    return ""
