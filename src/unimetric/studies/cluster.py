"""Execute a study on a Ray cluster, with one run per GPU or per fraction of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unimetric.errors import Interrupted
from unimetric.runs.cluster import connect
from unimetric.runs.storage import absolute, finished, read
from unimetric.spec import trusted
from unimetric.studies.board import Board
from unimetric.studies.grid import Run
from unimetric.studies.local import TRIES, begin, check_study_folder, save_run_labels
from unimetric.studies.worker import work

if TYPE_CHECKING:
    from unimetric.training.signals import Signals


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
    """Execute the runs that are not finished on a Ray cluster.

    A run whose worker is lost resumes from its last checkpoint. Ctrl-C and SIGTERM stop all runs with their checkpoints.

    Args:
        runs: Runs of `grid.read_grid`.
        out: Folder of the study, which every machine must reach: a shared disk, or an fsspec URL such as
            `s3://bucket/study`.
        address: Address of the cluster. `auto` finds the cluster of this machine, `local` starts one here.
        gpus: GPUs per run; with 0.5, two runs share one.
        cpus: Cores per run.
        pictures: Whether each run saves what a report shows of its embedding.
        quiet: Whether to print nothing.

    Returns:
        State of each run by id: `done` or `failed`.
    """
    from unimetric.training.signals import Signals

    check_study_folder(out)
    ray = connect(address)
    folder = absolute(out)
    save_run_labels(runs, folder)
    with Signals() as signals, Board(runs, folder, quiet=quiet) as board:  # after Ray has set its own handlers
        queue = Queue(ray, folder, board, gpus=gpus, cpus=cpus, pictures=pictures)
        for run in begin(runs, folder, board, pictures=pictures):
            queue.submit(run)
        follow(queue, signals)
        if queue.waiting:
            queue.cancel()
            raise Interrupted("the runs are saved; run the same command to resume them")
        return dict(board.states)


class Queue:
    """Submitted runs of a study, each one task of Ray.

    Args:
        ray: The module `ray`, connected to a cluster.
        folder: Folder of the study, or its fsspec URL.
        board: Display of the states.
        gpus: GPUs per run.
        cpus: Cores per run.
        pictures: Whether each run saves what a report shows of its embedding.
    """

    def __init__(self, ray: Any, folder: str, board: Board, *, gpus: float, cpus: float, pictures: bool) -> None:
        self.ray, self.folder, self.board, self.pictures = ray, folder, board, pictures
        # One process per run, so that nothing remains for the next one. Ray replaces lost processes and machines;
        # `finish` counts the errors of the run itself.
        self.task = ray.remote(max_calls=1, num_gpus=gpus, num_cpus=cpus, max_retries=3)(work)
        self.waiting: dict[Any, Run] = {}
        self.tries = Counter[str]()

    def submit(self, run: Run) -> None:
        """Submit a run."""
        self.tries[run.config.run_id] += 1
        reference = self.task.remote(asdict(run.config), self.folder, pictures=self.pictures, trust=trusted())
        self.waiting[reference] = run

    def finish(self, reference: Any) -> None:
        """Set the state of a run whose task has ended, or submit it again."""
        run = self.waiting.pop(reference)
        run_id = run.config.run_id
        reason = self._failure(reference)
        if finished(self.folder, run_id):
            self.board.set(run_id, "done", f"no gallery.npz: {reason}" if reason else "")
        elif self.tries[run_id] < TRIES:
            self.submit(run)
        else:
            self.board.set(run_id, "failed", reason or "the run wrote no `done`")

    def cancel(self) -> None:
        """Interrupt all runs, and wait up to a minute until they have saved themselves."""
        for reference in self.waiting:
            self.ray.cancel(reference)
        self.ray.wait(list(self.waiting), num_returns=len(self.waiting), timeout=60.0)

    def _failure(self, reference: Any) -> str:
        """Return the last line of a task's error, or "" if it did not fail."""
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return lines[-1].strip() if lines else type(error).__name__
        return ""


def follow(queue: Queue, signals: Signals) -> None:
    """Wait until all runs have ended or a signal stops the study, and show their states.

    Args:
        queue: Submitted runs.
        signals: Handler of the signals that stop the study.
    """
    board = queue.board
    while queue.waiting and not signals.requested:
        ready, _ = queue.ray.wait(list(queue.waiting), timeout=1.0)
        for reference in ready:
            queue.finish(reference)
        for run in queue.waiting.values():
            run_id = run.config.run_id
            if board.states[run_id] == "waiting" and read(queue.folder, f"{run_id}/config.toml"):  # its folder exists
                board.set(run_id, "running")
        board.show()
