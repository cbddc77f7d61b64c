"""The run folder: lock it, check its settings, open its model, read its result."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.config import NO_RESULT, RunConfig, from_settings, load
from unimetric.errors import UnimetricError
from unimetric.files import is_temporary, make_folder, remove_stale, write_json, write_text
from unimetric.foreign import declared
from unimetric.images.table import Table
from unimetric.runs.device import VERSION, peak_memory
from unimetric.runs.model import build_model
from unimetric.runs.record import check_files, check_images, finished_lines, seal_files
from unimetric.runs.weights import Trained, Undrawn, read_tensors
from unimetric.spec import bind, complete_arguments, find, parse, signature, text_of

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


def load_settings(folder: str | Path) -> RunConfig:
    """Return the settings of a run. A folder without them is an error."""
    file = Path(folder) / "config.toml"
    if not file.is_file():
        raise UnimetricError(f"{folder}: not a run folder (it has no config.toml)", "name a folder that `unimetric train --out` made")
    return load(file)


def study_runs(folder: Path) -> list[Path]:
    """Return the finished runs in a folder; none if the folder is itself a run.

    Args:
        folder: Folder of a study, or of a run.
    """
    if (folder / "config.toml").exists():
        return []
    return sorted(path.parent for path in folder.glob("*/done"))


def expand_studies(places: Sequence[str | Path]) -> list[Path]:
    """Return run folders, with the finished runs of a study in place of its folder.

    Args:
        places: Run folders, and folders of studies.
    """
    return [folder for place in map(Path, places) for folder in study_runs(place) or [place]]


def open_run(folder: str | Path, overrides: dict[str, Any] | None = None, *, epoch: str = "best") -> tuple[RunConfig, Any]:
    """Read the settings of a run, finished or not, and its model with trained weights.

    Args:
        folder: Run folder.
        overrides: Settings to replace, as in `overridden`. `backbone` locates the frozen weights of a run with an
            adapter, if they have moved. Other weights raise an error.
        epoch: `best` for the weights of the best epoch, `last` for those of the checkpoint.

    Returns:
        The settings and the model.
    """
    folder = Path(folder)
    own = load_settings(folder)
    weights = _weights_file(folder, epoch)
    config = overridden(own, overrides or {}, folder)
    with ThreadPoolExecutor(1) as pool:  # the file is hashed while the model is built
        reading = pool.submit(read_tensors, weights, "restore the file, or train the run again in a new folder")
        with contextlib.nullcontext() if config.adapter else Undrawn():  # the file does not contain frozen weights
            model = build_model(replace(own, backbone=config.backbone, head=config.head))
    tensors, notes = reading.result()
    check_settings(own, notes, weights)
    if epoch == "last":
        tensors = {key.removeprefix("model/"): value for key, value in tensors.items() if key.startswith("model/")}
    Trained(model, place=str(weights)).load_state_dict(tensors)
    return config, model


def _weights_file(folder: Path, epoch: str) -> Path:
    """Return the file with the weights of the best or the last epoch."""
    if epoch not in ("best", "last"):
        raise UnimetricError(f"`epoch` must be one of best, last, got `{epoch}`", "use `--epoch best`")
    weights = folder / ("checkpoint.safetensors" if epoch == "last" else "model.safetensors")
    if weights.is_file():
        return weights
    if epoch == "last":
        raise UnimetricError(f"{folder}: no weights of the last epoch (no checkpoint.safetensors)", "use `--epoch best`")
    if (folder / "done").exists():
        raise UnimetricError(
            f"{folder}: the weights are missing (no model.safetensors)", "restore the file, or train the run again in a new folder"
        )
    raise UnimetricError(f"{folder}: no weights yet (no model.safetensors)", "run `unimetric train` until its first evaluation")


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings of weights, for the notes of their file.

    `epochs` may be raised. Images may have moved; `data.json` identifies them.
    """
    later = {"epochs", "dataset", "split", "watch_datasets", "on_bad_picture"}
    return {key: value for key, value in asdict(config).items() if key not in NO_RESULT | later}


def check_settings(config: RunConfig, notes: dict[str, Any], weights: Path) -> None:
    """Raise an error if weights were trained with other settings.

    Weights of earlier versions do not store their settings.

    Args:
        config: Settings of the run.
        notes: Notes of the file of weights.
        weights: Path of the file, for the error.
    """
    own = json.loads(json.dumps(settings_of(config)))
    theirs = notes.get("settings")
    for key, value in theirs.items() if isinstance(theirs, dict) else ():
        if key in own and own[key] != value:
            raise UnimetricError(
                f"{weights.parent / 'config.toml'}: `{key}` is {own[key]!r}, but {weights.name} was trained with {value!r}",
                "restore config.toml; settings that may differ from training are given on the command line, as `key=value`",
            )


def check_own_images(run: str | Path, config: RunConfig, table: Table, parts: Mapping[str, np.ndarray]) -> None:
    """Raise an error if the images of a run have changed since it started.

    A replaced dataset or split is not compared.

    Args:
        run: Run folder.
        config: Settings of the evaluation.
        table: Table of the images.
        parts: Rows by part: `train`, `validation`, `test`.
    """
    own = load(Path(run) / "config.toml")
    if all(getattr(own, key) == getattr(config, key) for key in ("dataset", "split", "seed", "on_bad_picture")):
        check_images(Path(run), table, parts)


def overridden(config: RunConfig, overrides: dict[str, Any], run: str | Path) -> RunConfig:
    """Replace some settings of a run.

    Another adapter or head raises an error. Only the test-time arguments of the head may change.

    Args:
        config: Settings of the run.
        overrides: Settings by name. Arguments that the head omits keep the run's values.
        run: Run folder, for errors.

    Returns:
        The new settings.
    """
    if overrides.get("adapter", config.adapter) != config.adapter:
        raise UnimetricError(f"{run}: was trained with `adapter = {config.adapter!r}`", "remove `adapter`, or train another run")
    if "head" in overrides:
        overrides = overrides | {"head": _head_at_test_time(config.head, str(overrides["head"]), run)}
    return from_settings(asdict(config) | overrides, str(run))


def _head_at_test_time(own: str, given: str, run: str | Path) -> str:
    """Return the spec string of a run's head with other test-time arguments."""
    if given == own:
        return own
    name = parse(own).name
    free = declared("heads", find("heads", name), "test_time")
    hint = f"change only {' and '.join(f'`{key}`' for key in free)}" if free else "remove `head`"
    error = UnimetricError(f"{run}: was trained with `head = {own!r}`", f"{hint}, or train another run")
    if parse(given).name != name:
        raise error
    unset = object()  # marks run-provided arguments
    (part, mine), (_, theirs) = (bind("heads", text, features=unset, seed=unset) for text in (own, given))
    merged = {key: value for key, value in (mine | theirs).items() if value is not unset}
    for key, value in merged.items():
        if key not in free and value != mine.get(key, signature(part).parameters[key].default):
            raise error
    return text_of(name, merged)


#: Prefixes of files that exist before `config.toml`. A run that was killed at that moment restarts from scratch.
_BEGUN = (".lock", ".config.toml.")


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Raise an error unless a folder is empty or belongs to the same run.

    The run in the folder may have fewer epochs. A run without a trained epoch may be any run.
    """
    try:
        known = (folder / "config.toml").is_file()
        strange = folder.exists() and (not folder.is_dir() or any(not each.name.startswith(_BEGUN) for each in folder.iterdir()))
    except OSError as error:
        raise UnimetricError(f"{folder}: cannot be read: {error.strerror}", "choose another --out") from None
    if not known and strange:
        raise UnimetricError(f"{folder}: exists and is not a run folder", "choose another --out")
    if known and not _is_replaceable(folder):
        _check_same_settings(config, folder)


#: Files and folders of a run before its first checkpoint. `model.safetensors` may be the untrained model.
_FIRST = {"config.toml", "data.json", "environment.json", "metrics.jsonl", "model.safetensors", "skipped.txt", "tensorboard", "csv"}


#: Files that describe the weights of a run. They are wrong as soon as it is trained further.
_OF_WEIGHTS = ("gallery.npz", "calibration.json", "calibration.png", "adapt_*_shots.json")


def _is_replaceable(folder: Path) -> bool:
    """Return whether a run folder has no checkpoint, no trained epoch and no other files.

    A model without the log line of epoch 0 was copied or interpolated, and a config without `environment.json` was written by hand.
    """
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".lock") and not is_temporary(path.name)}
    if not names <= _FIRST or "environment.json" not in names:
        return False
    start = finished_lines(folder, 0)
    return finished_lines(folder, sys.maxsize) == start and ("model.safetensors" not in names or bool(start))


def _remove_run(folder: Path) -> None:
    """Remove the files of a replaceable run, except `config.toml`, which marks a run folder."""
    for name in _FIRST - {"config.toml"}:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _check_same_settings(config: RunConfig, folder: Path) -> None:
    """Raise an error unless the run of a folder has the same settings, or fewer epochs."""
    other = load(folder / "config.toml")
    if key := config.first_difference(other, "epochs"):
        raise UnimetricError(
            f"{folder}: contains another run ({key} = {getattr(other, key)!r}, not {getattr(config, key)!r})",
            "choose another --out, or remove the folder",
        )
    if config.epochs != other.epochs:
        _check_longer(config, other, folder)


def _check_longer(config: RunConfig, other: RunConfig, folder: Path) -> None:
    """Raise an error unless a longer run can start from the checkpoint of a shorter one.

    It can if the result is that of an uninterrupted run.
    """
    problem = f"{folder}: contains a run with `epochs = {other.epochs}`, which cannot become {config.epochs}"
    hint = "choose another --out, or remove the folder"
    if config.epochs < other.epochs:
        raise UnimetricError(f"{problem}: its epochs can only be raised", hint)
    schedule, arguments = bind("schedules", config.schedule)
    for step in range(16 * other.epochs):
        now = step / 16
        before, after = (schedule(now, epochs, **arguments) for epochs in (other.epochs, config.epochs))
        if before != after:
            raise UnimetricError(
                f"{problem}: the schedule `{config.schedule}` depends on their number. Its factor after {now:g} epochs was {before:.4g}, "
                f"and is {after:.4g} in the longer run",
                f"{hint}; `constant` and `step` schedules allow it",
            )
    every = config.evaluate_every
    evaluated = finished_lines(folder, other.epochs) != finished_lines(folder, other.epochs - 1)  # also if it was killed before `done`
    if evaluated and (not every or other.epochs % every):
        raise UnimetricError(
            f"{problem}: epoch {other.epochs} was evaluated because it was the last, and a longer run with `evaluate_every = {every}` "
            "does not evaluate it",
            hint,
        )


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Return whether a folder contains the finished run, with all epochs of the settings."""
    return (folder / "done").exists() and load(folder / "config.toml").epochs == config.epochs


@contextlib.contextmanager
def lock_run_folder(config: RunConfig, folder: Path, *, device: torch.device) -> Iterator[None]:
    """Make the run folder and lock it for this process.

    Temporary files that a killed process has left are removed, and so are results of earlier weights. A run without a trained epoch
    is replaced. At the end, the peak memory is added to `environment.json`, and `data.json` gets the checksums of a finished run.

    Args:
        config: Settings of the run, for `config.toml`.
        folder: Run folder.
        device: Device of the run.
    """
    make_folder(folder)
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "lightning": VERSION,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "run_id": config.run_id,
    }
    weights = pretrained_weights(config)
    if weights:
        environment["weights"] = weights
    with lock_folder(folder) as locked:
        remove_stale(folder)
        if (folder / "config.toml").is_file():
            if locked and _is_replaceable(folder):  # without a lock, another process may be training in it
                _remove_run(folder)
            else:
                _check_same_settings(config, folder)  # again, because another process may have used the folder meanwhile
        seal_files(folder, finished=False)
        (folder / "done").unlink(missing_ok=True)  # a run that gets more epochs is not finished
        for path in (path for pattern in _OF_WEIGHTS for path in folder.glob(pattern)):
            path.unlink()
        comment = f"# weights of the backbone: {weights}\n" if weights else ""
        write_text(folder / "config.toml", comment + config.dump())  # first, because it marks a run folder even after a crash
        write_json(folder / "environment.json", environment)
        try:
            yield
        finally:
            environment["peak_memory_gib"] = peak_memory(device)
            with contextlib.suppress(UnimetricError):  # on a full disk, the run's own error is the one to report
                write_json(folder / "environment.json", environment)
                seal_files(folder, finished=(folder / "done").exists())


def pretrained_weights(config: RunConfig) -> str:
    """Return the name of the downloaded weights of a run's backbone with their tag, or "".

    A name without a tag means timm's default, which may change with its version.

    Args:
        config: Settings of the run.
    """
    if parse(config.backbone).name != "timm":
        return ""
    arguments = complete_arguments("backbones", config.backbone)
    if not arguments["pretrained"]:
        return ""
    from unimetric.backbones._hub import resolve_weights  # loads timm

    return resolve_weights(arguments["name"])


@contextlib.contextmanager
def lock_folder(folder: Path, work: str = "training in") -> Iterator[bool]:
    """Lock a folder, if the system supports it, so that two processes do not mix their files.

    A killed process releases the lock. The value of the context is whether the folder is locked.

    Args:
        folder: Folder that exists.
        work: What the other process does with the folder, for the error.
    """
    if fcntl is None:
        yield False
        return
    try:
        file = open(folder / ".lock", "ab")  # noqa: SIM115
    except OSError as error:
        raise UnimetricError(f"{folder}: cannot be written: {error.strerror}", "choose another --out") from None
    with file:
        locked = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which data workers of a killed run would keep
            if not os.fstat(file.fileno()).st_nlink:  # its owner has removed it meanwhile, and a third process may have locked a new one
                raise BlockingIOError
        except (BlockingIOError, PermissionError):
            raise UnimetricError(f"{folder}: another process is {work} it", "wait until it ends, or choose another --out") from None
        except OSError:  # some network file systems have no locks
            locked = False
        try:
            yield locked
        finally:
            (folder / ".lock").unlink(missing_ok=True)


def read_done(folder: Path) -> dict[str, Any]:
    """Read the log line of the best epoch of a finished run."""
    hint = "remove the file and run the same command: the run finishes from its checkpoint"
    try:
        line = json.loads((folder / "done").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnimetricError(f"{folder / 'done'}: unreadable: {error}", hint) from None
    measured = [value for key, value in line.items() if "/" in key] if isinstance(line, dict) else []
    if not measured or not {"epoch", "chosen_on"} <= line.keys() or not all(isinstance(value, int | float) for value in measured):
        raise UnimetricError(f"{folder / 'done'}: not the line of a best epoch", hint)
    check_files(folder)
    return line
