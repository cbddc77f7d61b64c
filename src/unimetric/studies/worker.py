"""One run of a study, in a process of its own: a crash takes this run with it and no other."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unimetric.config import from_settings
from unimetric.errors import Interrupted, UnimetricError
from unimetric.runs.storage import Mirror, on_disk, pull


def work(settings: dict[str, Any], place: str, *, pictures: bool = True, seconds: float = 30.0) -> None:
    """Train a run, or go on with it, in `PLACE/<id>`.

    Args:
        settings: of the run.
        place: the study's folder, or where fsspec finds it.
        pictures: write `gallery.npz`, too: what a report shows of the embedding.
        seconds: between copies to a place that is no disk of this machine.
    """
    from unimetric.analysis.gallery import write_gallery
    from unimetric.training.loop import train

    config = from_settings(settings, "study")
    folder = on_disk(place)
    if folder is not None:
        with _alone(folder, config.run_id):
            train(config, folder / config.run_id, quiet=True)
            if pictures and not (folder / config.run_id / "gallery.npz").exists():
                write_gallery(folder / config.run_id)
        return
    with tempfile.TemporaryDirectory() as here:
        mine = Path(here) / config.run_id
        pull(f"{place}/{config.run_id}", mine)
        with Mirror(mine, f"{place}/{config.run_id}", seconds=seconds):
            train(config, mine, quiet=True)
            if pictures and not (mine / "gallery.npz").exists():
                write_gallery(mine)


@contextmanager
def _alone(folder: Path, run_id: str) -> Iterator[None]:
    """Two processes never work on one run: the second waits. A process that dies, however it dies, lets go."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with open(folder / "logs" / f"{run_id}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def work_apart(settings: dict[str, Any], place: str, log: str, pictures: bool, gpu: str = "", threads: int = 0) -> None:
    """Call `work` in a process that `multiprocessing` has started, with its output in a file.

    The run is saved and stopped when the parent process ends.

    Args:
        settings, place, pictures: See `work`.
        log: File for the output.
        gpu: The one GPU that the run uses, as `CUDA_VISIBLE_DEVICES` names it. Empty for all.
        threads: Number of threads of torch. 0 for its default.
    """
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialized
    if threads:
        import torch

        torch.set_num_threads(threads)
    try:
        work(settings, place, pictures=pictures)
    except UnimetricError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)


def _leave_with_parent() -> None:
    """Ask this process to save and stop when its parent is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
