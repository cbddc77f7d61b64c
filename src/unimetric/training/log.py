"""The log of a run: `metrics.jsonl`, Lightning's loggers, and lines on the terminal."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.device import CSVLogger, Fabric, TensorBoardLogger, peak_memory
from unimetric.runs.display import source_table
from unimetric.runs.record import finished_lines
from unimetric.training.state import TrainingState, count_per_dataset, evaluate_starting_point

CHECKPOINT = "checkpoint.safetensors"


def check_finite_loss(total: float, epoch: int, step: int, folder: Path) -> float:
    """Return the sum of the losses of an epoch; raise an error if it is not finite."""
    if math.isfinite(total):
        return total
    raise diverged(folder, f"the loss is not finite in epoch {epoch + 1}, at or before step {step}")


def diverged(folder: Path, problem: str) -> UnimetricError:
    """Return the error of a run that cannot continue, with its last checkpoint if any."""
    kept = "; the last checkpoint is unchanged" if (folder / CHECKPOINT).exists() else ""
    hint = "lower the learning rate, set `clip_norm = 1.0`, or use `precision = '32-true'`; if programs share the GPU, try it alone"
    return UnimetricError(f"{folder}: {problem}{kept}", hint)


def format_log_line(line: dict[str, Any], epochs: int) -> str:
    """Format a line of `metrics.jsonl` for the terminal."""
    words = [f"epoch {line['epoch']:>3}/{epochs}"]
    if "loss" in line:
        words += [f"loss {line['loss']:.4f}", f"{line['pictures_per_second']:,.0f} images/s"]
    if "peak_memory_gib" in line:
        words.append(f"{line['peak_memory_gib']:.1f} GiB")
    return _with_values(words, main_metrics(line))


def _with_values(words: list[str], values: dict[str, float]) -> str:
    """Return a line of words and metric values, and below it a table of single datasets.

    Singular values are excluded.
    """
    values, table = source_table(
        {key: value for key, value in values.items() if not re.search(r"(singular_values|class_spectra)\b.*/\d+$", key)}
    )
    return "\n".join(["  ".join([*words, *(f"{key} {value:.4f}" for key, value in values.items())]), *table])


def main_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the metric values `PART/METRIC` of a line, without loss terms and head variants."""
    return {key: value for key, value in line.items() if key.startswith(("validation/", "test/", "train/"))}


def variant_lines(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metric values of each head variant of a line.

    Args:
        line: Line of `metrics.jsonl`. It stores variants as `PART NAME/METRIC`, such as
            `test weights=1,1,1,1/recall(k=1)`.

    Returns:
        For each variant, its `epoch` and its values by `PART/METRIC`.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in line.items():
        space, slash, metric = key.partition("/")
        part, blank, name = space.partition(" ")
        if slash and blank and part in ("validation", "test", "train"):
            found.setdefault(name, {"epoch": line["epoch"]})[f"{part}/{metric}"] = value
    return found


def open_logger(config: RunConfig, folder: Path) -> Any:
    """Open the logger that the settings name. It writes to the run folder.

    Returns:
        A logger of Lightning, or None.
    """
    try:
        if config.logger == "tensorboard":
            return TensorBoardLogger(root_dir=folder, name="tensorboard", version="")
        if config.logger == "csv":
            return CSVLogger(root_dir=folder, name="csv", version="", flush_logs_every_n_steps=1)
        if config.logger == "wandb":
            from lightning.pytorch.loggers import WandbLogger

            return WandbLogger(name=folder.name, save_dir=folder, project="unimetric")
        if config.logger == "mlflow":
            from lightning.pytorch.loggers import MLFlowLogger

            uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve()}/mlflow.db")
            place = str(folder.resolve() / "mlflow")
            return MLFlowLogger(run_name=folder.name, experiment_name="unimetric", tracking_uri=uri, artifact_location=place)
    except ModuleNotFoundError as error:
        raise UnimetricError(
            f"`logger = {config.logger!r}`: {error}", f"pip install lightning {config.logger}, or write `logger = 'none'`"
        ) from None
    return None


class Log:
    """`metrics.jsonl` and the loggers of Fabric.

    Lines of epochs that will be repeated are removed.

    Args:
        folder: Run folder.
        fabric: Fabric of the run. Its loggers receive the same values.
        upto: Last epoch whose line stays; -1 removes all lines.
    """

    def __init__(self, folder: Path, fabric: Fabric, *, upto: int) -> None:
        self.path, self.fabric = folder / "metrics.jsonl", fabric
        if fabric.global_rank != 0:
            return
        valid = finished_lines(folder, upto)
        write_text(self.path, "".join(f"{line}\n" for line in valid))
        if not any(isinstance(logger, TensorBoardLogger) for logger in fabric.loggers):  # all others start over
            for line in valid:
                self._send(json.loads(line))

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        if self.fabric.global_rank == 0:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._send(line)

    def _send(self, line: dict[str, Any]) -> None:
        try:
            self.fabric.log_dict({key: value for key, value in line.items() if isinstance(value, int | float)}, step=line["epoch"])
        except ValueError as error:
            if isinstance(error.__cause__, OSError):  # Lightning reports a full disk as a value that cannot be logged
                raise error.__cause__ from None
            raise


def log_starting_point(state: TrainingState, log: Log) -> dict[str, Any]:
    """Print the sizes of the run, and evaluate and log its starting point.

    The starting point is the raw backbone and the model before the first step.

    Returns:
        The log line of epoch 0. `raw` has the metric values of the raw backbone, if they were measured.
    """
    config, display = state.config, state.display
    test_classes = len(np.unique(state.table.labels[state.split.test]))
    display.line(
        f"run {config.run_id}: {len(state.labels):,} training images of {state.labels.max() + 1:,} classes, "
        f"{len(state.split.test):,} test images of {test_classes:,} classes ({state.fabric.device})"
    )
    line: dict[str, Any] = {"epoch": 0}
    for name, (images, classes) in count_per_dataset(state.table, state.split).items():
        display.line(f"  {name}: {images:,} training images of {classes:,} classes")
        line |= {f"pictures of {name}": images, f"classes of {name}": classes}
    if config.evaluate_every:
        values, raw = evaluate_starting_point(state)
        line |= values | {"raw": raw, "peak_memory_gib": peak_memory(state.fabric.device)}
        display.line(_with_values(["raw backbone"], raw))
        display.line(format_log_line(line, config.epochs))
    if len(line) > 1:
        log.write(line)
    return line


def write_skipped(state: TrainingState, folder: Path) -> None:
    """Write the paths of skipped images to `skipped.txt`, and print them."""
    lines = [f"{path}: {reason}" for path, reason in state.skipped]
    write_text(folder / "skipped.txt", "".join(f"{line}\n" for line in lines))
    for line in lines:
        state.display.line(f"skipped {line}")


@contextmanager
def closed_loggers(fabric: Fabric) -> Iterator[None]:
    """Close the loggers at the end of the block.

    A run that is interrupted or has an error is closed as failed, so that no service shows it as running.
    """
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for logger in fabric.loggers:
            logger.finalize(status)


def finish(fabric: Fabric, folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write `done`, and return the result."""
    if fabric.global_rank == 0:
        write_text(folder / "done", json.dumps(result))
    return result
