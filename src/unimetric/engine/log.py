"""What a run leaves in its folder besides weights."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unimetric.config import NO_RESULT, RunConfig, load
from unimetric.engine.fabric import VERSION, CSVLogger, TensorBoardLogger
from unimetric.errors import UnimetricError
from unimetric.files import write_text

try:
    import fcntl
    import resource
except ModuleNotFoundError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]


#: What lies in a folder before its settings do: a run that was killed in that moment begins anew.
_BEGUN = (".lock", ".config.toml.")


def refuse_other(config: RunConfig, folder: Path) -> None:
    """See that a folder is free, or this run's own."""
    if (folder / "config.toml").exists():
        other = load(folder / "config.toml")
        if other.run_id != config.run_id:
            mine, theirs = asdict(config), asdict(other)
            key = next(key for key in mine if key not in NO_RESULT and mine[key] != theirs[key])
            raise UnimetricError(
                f"{folder}: holds another run ({key} = {theirs[key]!r}, not {mine[key]!r})", "choose another --out, or remove the folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(not each.name.startswith(_BEGUN) for each in folder.iterdir())):
        raise UnimetricError(f"{folder}: is in use, and not a run folder", "choose another --out")


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GiB.

    On a GPU this is the memory that torch has reserved, without the CUDA context. On a CPU it is the resident memory.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_reserved(device) / 2**30, 3)
    if resource is None:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)


@contextlib.contextmanager
def claim(config: RunConfig, folder: Path, *, device: torch.device) -> Iterator[None]:
    """Make the run folder and lock it for this process. At the end, add the peak memory to `environment.json`.

    Args:
        config: Settings of the run, for `config.toml`.
        folder: Run folder.
        device: Device of the run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnimetricError(f"{folder}: cannot be made: {error.strerror}", "choose another --out") from None
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
    with _alone(folder):
        write_text(folder / "config.toml", config.dump())  # first: by it the folder is known to be a run's, whenever the power goes
        write_text(folder / "environment.json", json.dumps(environment, indent=1))
        try:
            yield
        finally:
            environment["peak_memory_gib"] = peak_memory(device)
            with contextlib.suppress(UnimetricError):  # on a full disk, the run's own error is the one to report
                write_text(folder / "environment.json", json.dumps(environment, indent=1))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder, where the system knows how: two runs in it would mix their lines. A killed process lets go by itself."""
    if fcntl is None:
        yield
        return
    try:
        file = open(folder / ".lock", "ab")  # noqa: SIM115
    except OSError as error:
        raise UnimetricError(f"{folder}: cannot be written: {error.strerror}", "choose another --out") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which workers that outlive their killed run would hold on to
        except (BlockingIOError, PermissionError):
            raise UnimetricError(f"{folder}: another process trains in it now", "wait for it, or choose another --out") from None
        except OSError:  # some file systems of networks have no locks
            pass
        try:
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)


def finite(total: float, epoch: int, step: int, folder: Path) -> float:
    """The sum of losses, which must be a number."""
    if math.isfinite(total):
        return total
    raise UnimetricError(
        f"{folder}: the loss is not finite any more (epoch {epoch + 1}, by step {step}); the last good checkpoint is kept",
        "lower the learning rate, set `clip_norm = 1.0`, or use `precision = '32-true'`",
    )


def read_done(folder: Path) -> dict[str, Any]:
    """The line of the best epoch of a finished run."""
    hint = "remove the file, and the run ends from its checkpoint"
    try:
        line = json.loads((folder / "done").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnimetricError(f"{folder / 'done'}: unreadable: {error}", hint) from None
    measured = [value for key, value in line.items() if "/" in key] if isinstance(line, dict) else []
    if not measured or not {"epoch", "chosen_on"} <= line.keys() or not all(isinstance(value, int | float) for value in measured):
        raise UnimetricError(f"{folder / 'done'}: not the line of a best epoch", hint)
    return line


def described(line: dict[str, Any], epochs: int) -> str:
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
