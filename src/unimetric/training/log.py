"""The log of a run: `metrics.jsonl`, loggers, and lines for people."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.device import CSVLogger, TensorBoardLogger


def check_finite_loss(total: float, epoch: int, step: int, folder: Path) -> float:
    """The sum of losses, which must be a number."""
    if math.isfinite(total):
        return total
    raise UnimetricError(
        f"{folder}: the loss is not finite any more (epoch {epoch + 1}, by step {step}); the last good checkpoint is kept",
        "lower the learning rate, set `clip_norm = 1.0`, or use `precision = '32-true'`",
    )


def format_log_line(line: dict[str, Any], epochs: int) -> str:
    """Format a line of `metrics.jsonl` for the terminal."""
    words = [f"epoch {line['epoch']:>3}/{epochs}"]
    if "loss" in line:
        words += [f"loss {line['loss']:.4f}", f"{line['pictures_per_second']:,.0f} pictures/s"]
    if "peak_memory_gib" in line:
        words.append(f"{line['peak_memory_gib']:.1f} GiB")
    words += [f"{key} {value:.4f}" for key, value in main_metrics(line).items()]
    return "  ".join(words)


def main_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the metric values `PART/METRIC` of a line, without loss terms and head variants."""
    return {key: value for key, value in line.items() if key.startswith(("validation/", "test/"))}


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
        if slash and blank and part in ("validation", "test"):
            found.setdefault(name, {"epoch": line["epoch"]})[f"{part}/{metric}"] = value
    return found


def open_logger(config: RunConfig, folder: Path) -> Any:
    """Lightning's logger of that name, writing into the run folder."""
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

            return MLFlowLogger(run_name=folder.name, experiment_name="unimetric", save_dir=str(folder / "mlflow"))
    except ModuleNotFoundError as error:
        raise UnimetricError(
            f"`logger = {config.logger!r}`: {error}", f"pip install lightning {config.logger}, or write `logger = 'none'`"
        ) from None
    return None


class Log:
    """`metrics.jsonl`, and the logger beside it. Lines of epochs that are about to be done again are dropped.

    Args:
        folder: the run folder.
        fabric: whose loggers get the same numbers.
        upto: the last epoch whose line stays; -1 drops them all.
    """

    def __init__(self, folder: Path, fabric: Any, *, upto: int) -> None:
        self.path, self.fabric = folder / "metrics.jsonl", fabric
        if fabric.global_rank == 0:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []
            kept = [line for line in lines if _epoch(line) <= upto]
            write_text(self.path, "".join(f"{line}\n" for line in kept))
            if any(isinstance(logger, CSVLogger) for logger in fabric.loggers):  # it begins its file anew
                for line in kept:
                    self._tell(json.loads(line))

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        if self.fabric.global_rank == 0:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._tell(line)

    def _tell(self, line: dict[str, Any]) -> None:
        self.fabric.log_dict({key: value for key, value in line.items() if isinstance(value, int | float)}, step=line["epoch"])


def _epoch(line: str) -> float:
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # the line that was being written when the power went
