"""One run of a study in a separate process, so that a crash does not affect other runs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unimetric.config import RunConfig, from_settings
from unimetric.errors import Interrupted, UnimetricError
from unimetric.files import wait_for_lock
from unimetric.runs.storage import Mirror, on_disk, pull
from unimetric.spec import trusting


def work(settings: dict[str, Any], place: str, *, pictures: bool = True, seconds: float = 30.0, trust: Sequence[str] = ()) -> None:
    """Train or resume a run in `PLACE/<id>`.

    Args:
        settings: Settings of the run.
        place: Folder of the study, or its fsspec URL.
        pictures: Whether to write `gallery.npz` for the report.
        seconds: Time between copies to remote storage, in seconds.
        trust: Packages that the caller trusts; see `spec.trusting`.
    """
    with trusting(*trust):
        config, folder = from_settings(settings, "study"), on_disk(place)
        if folder is not None:
            with wait_for_lock(folder / "logs" / f"{config.run_id}.lock"):
                _train(config, folder / config.run_id, pictures=pictures)
            return
        with tempfile.TemporaryDirectory() as here:
            mine = Path(here) / config.run_id
            pull(f"{place}/{config.run_id}", mine)
            with Mirror(mine, f"{place}/{config.run_id}", seconds=seconds):
                _train(config, mine, pictures=pictures)


def _train(config: RunConfig, folder: Path, *, pictures: bool) -> None:
    from unimetric.analysis.gallery import write_gallery
    from unimetric.training.loop import train

    train(config, folder, quiet=True)
    if pictures and not (folder / "gallery.npz").exists():
        write_gallery(folder)


def work_apart(
    settings: dict[str, Any], place: str, log: str, pictures: bool, gpu: str = "", threads: int = 0, trust: Sequence[str] = ()
) -> None:
    """Call `work` in a process that `multiprocessing` has started, with its output in a file.

    The run is saved and stopped when the parent process ends.

    Args:
        settings, place, pictures: See `work`.
        log: File for the output.
        gpu: The one GPU that the run uses, as `CUDA_VISIBLE_DEVICES` names it. Empty for all.
        threads: Number of threads of torch. 0 for its default.
        trust: Packages that the caller trusts; see `spec.trusting`.
    """
    from unimetric.images.workers import stop_with_parent

    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A fork server makes itself the default of its processes. Another one would import torch again for each worker of each epoch.
    multiprocessing.set_start_method(None, force=True)
    stop_with_parent()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialized
    if threads:
        import torch

        torch.set_num_threads(threads)
    try:
        work(settings, place, pictures=pictures, trust=trust)
    except UnimetricError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)
