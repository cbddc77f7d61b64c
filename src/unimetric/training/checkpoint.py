"""Checkpoints: all that a run needs to resume, in one safetensors file.

The file is written atomically. It holds all rows of parameters that are divided among ranks, so that any number of ranks resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.geometry.shards import Shard, join, shard_of
from unimetric.runs.device import evaluation_batch
from unimetric.runs.folder import check_settings, settings_of
from unimetric.runs.record import RECORD, check_images, check_watched, hash_log, record_images
from unimetric.runs.weights import read_tensors, write_tensors
from unimetric.training.distributed import warn_of_slices
from unimetric.training.log import CHECKPOINT, diverged
from unimetric.training.progress import Progress
from unimetric.training.state import TrainingState, embed_rows


def resume(state: TrainingState, folder: Path) -> Progress:
    """Load the checkpoint of a run folder, if there is one, and fill the sampler's memory.

    Returns:
        The position of the run.
    """
    path = folder / CHECKPOINT
    resumed = path.exists()
    warn_of_slices(state.fabric, state.bare, state.objective, state.display)
    recorded = (folder / RECORD).exists()
    if resumed and not recorded:
        state.display.line(f"{folder}: no {RECORD}, so the images are not compared with those of the interrupted run")
    if state.fabric.global_rank == 0 and not (resumed and recorded):
        record_images(folder, state.table, state.split, state.watched)
    if state.sampler.needs_embeddings and resumed:  # restoring only needs a buffer of the right shape
        state.sampler.fill(torch.zeros(len(state.labels), state.bare.dim, device=state.fabric.device))
    elif state.sampler.needs_embeddings:
        state.sampler.fill(embed_rows(state, state.split.train))
    if not resumed:
        return Progress()
    notes = restore(path, parts=state.parts, optimizers=state.optimizers, precision=state.fabric.strategy.precision, config=state.config)
    if "execution" not in notes and state.fabric.device.type == "cpu":
        # An earlier version wrote this checkpoint, with the plain layout on a CPU. Another one would change the rounding.
        state.bare.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    if notes.get("log", "") not in ("", hash_log(folder, notes["epoch"])):
        raise UnimetricError(
            f"{folder / 'metrics.jsonl'}: lines of finished epochs were modified",
            f"restore the file, or remove {path} to restart from scratch",
        )
    changes = [f"{new} (was: {old})" for old, new in zip(notes.get("execution", []), describe_execution(state), strict=False) if old != new]
    if changes:
        state.display.line(f"resuming with {', '.join(changes)}: the result may differ from an uninterrupted run by rounding")
    known = {key: notes[key] for key in Progress().notes() if key in notes}  # old checkpoints have no `variants`
    progress = Progress(**known, resumed=True)
    if progress.best is not None and _epoch_of_weights(folder) > progress.epoch:
        # The weights of the best epoch were replaced by those of a later one, which is lost. A repeated epoch may differ by rounding,
        # so the best epoch is selected among those from now on.
        progress.best = None
    state.display.line(f"resuming after epoch {progress.epoch}, step {progress.step}")
    return progress


def _epoch_of_weights(folder: Path) -> int:
    """Return the epoch of `model.safetensors`, or 0 if an earlier version wrote it.

    A missing or damaged file is an error.
    """
    weights = folder / "model.safetensors"
    try:
        with safe_open(weights, framework="pt") as file:
            return int(json.loads(file.metadata()["notes"])["metrics"]["epoch"])
    except (OSError, SafetensorError) as error:
        raise UnimetricError(
            f"{weights}: the weights of the best epoch cannot be read: {error}",
            f"restore the file, or remove {folder / CHECKPOINT} to restart from scratch",
        ) from None
    except (KeyError, TypeError, ValueError):
        return 0


def describe_execution(state: TrainingState) -> list[str]:
    """Describe what is not part of the run id, but changes the rounding of results."""
    device = torch.cuda.get_device_name(state.fabric.device) if state.fabric.device.type == "cuda" else state.fabric.device.type
    described = [
        f"torch {torch.__version__}",
        f"device {device}",
        f"{state.fabric.world_size} processes",
        f"{torch.get_num_threads()} threads",
        f"evaluate_batch {evaluation_batch(state.config, state.fabric)}",
        state.loader.arithmetic,
    ]
    if state.sampler.needs_embeddings:  # workers request batches ahead of the step, which are selected from older embeddings
        described.append(f"batches requested by {state.loader.workers} workers")
    return described


def check_data(state: TrainingState, folder: Path) -> None:
    """Raise an error if a run would resume with other images.

    Call this before any file of the folder changes.
    """
    if (folder / CHECKPOINT).exists():
        check_images(folder, state.table, state.split.parts)
        check_watched(folder, state.watched)


def save_checkpoint(state: TrainingState, folder: Path, progress: Progress) -> None:
    """Write the checkpoint of a run folder. All ranks must call it."""
    fabric = state.fabric
    check_finite_weights(state, folder)
    state.writer.wait()  # a checkpoint must not name a best epoch whose weights may be lost
    whole = join_shards(parts=state.parts, optimizers=state.optimizers)
    if fabric.global_rank == 0:
        save(
            folder / CHECKPOINT,
            parts=state.parts,
            optimizers=state.optimizers,
            progress=progress.notes() | {"log": hash_log(folder, progress.epoch), "execution": describe_execution(state)},
            precision=fabric.strategy.precision,
            config=state.config,
            whole=whole,
        )
    fabric.barrier()


def write_best(state: TrainingState, folder: Path, line: dict[str, Any]) -> None:
    """Start to write the weights of the best epoch."""
    check_finite_weights(state, folder)
    notes: dict[str, Any] = {"metrics": line, "settings": settings_of(state.config)}
    if state.config.adapter:
        notes["backbone"] = state.config.backbone
    state.writer.write(folder / "model.safetensors", state.trained.state_dict(), notes)


def check_finite_weights(state: TrainingState, folder: Path) -> None:
    """Raise an error if a weight is not finite, before it replaces a file of finite weights."""
    weights = [weight.detach() for part in (state.bare, state.objective) for weight in part.parameters() if weight.requires_grad]
    if weights and not torch.stack([torch.isfinite(weight).all() for weight in weights]).all():
        raise diverged(folder, "the weights are not finite")


def save(
    path: Path,
    *,
    parts: dict[str, Any],
    optimizers: dict[str, Any],
    progress: dict[str, Any],
    precision: Any | None = None,
    config: RunConfig | None = None,
    whole: dict[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint.

    Args:
        path: File to write.
        parts: Objects with a `state_dict()` of tensors: model, objective, sampler.
        optimizers: Optimizers by name. Their tensors are stored as tensors, their numbers as a note.
        progress: Position of the run, as numbers and text.
        precision: Precision plugin of Fabric. The one of `16-mixed` has a state, the scale of the loss.
        config: Settings of the run, to store with the weights.
        whole: Tensors of `join_shards`, which replace those of this rank.
    """
    tensors = {f"{name}/{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    groups: dict[str, Any] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        groups[name] = state["param_groups"]
        for index, moments in state["state"].items():
            for key, value in moments.items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{index}/{key}"] = value
                else:
                    numbers.setdefault(f"{name}/{index}", {})[key] = value
    tensors |= whole or {}
    scale = precision.state_dict() if precision is not None else {}
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    notes = {"progress": progress, "groups": groups, "numbers": numbers, "scale": scale}
    write_tensors(path, tensors, notes | ({} if config is None else {"settings": settings_of(config)}))


def join_shards(*, parts: dict[str, Any], optimizers: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that are divided among ranks.

    They are whole on the first rank only. All ranks must call it.
    """
    found: dict[str, Tensor] = {}
    for key, (parameter, shard) in _shards(parts, optimizers).items():
        name, _, index = key.partition("/")
        moments = optimizers[name].state_dict()["state"].get(int(index), {}) if name in optimizers else {"": parameter}
        for moment, value in moments.items():
            if isinstance(value, Tensor) and value.dim():
                found[f"{key}/{moment}".rstrip("/")] = join(value, shard.total)
    return found


def _shards(parts: dict[str, Any], optimizers: dict[str, Any]) -> dict[str, tuple[nn.Parameter, Shard]]:
    """Return the divided parameters by `PART/NAME` and by `OPTIMIZER/INDEX`."""
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    named = [(f"{name}/{key}", each) for name, module in modules.items() for key, each in module.named_parameters()]
    for name, optimizer in optimizers.items():
        numbered = enumerate(each for group in optimizer.param_groups for each in group["params"])
        named += [(f"{name}/{index}", each) for index, each in numbered]
    return {key: (each, shard) for key, each in named if (shard := shard_of(each)) is not None}


def restore(
    path: Path,
    *,
    parts: dict[str, Any],
    optimizers: dict[str, Any],
    precision: Any | None = None,
    config: RunConfig | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into the objects that `save` received.

    Args:
        path: File to read.
        parts: Objects with a `load_state_dict()`.
        optimizers: Optimizers by name.
        precision: Precision plugin of Fabric.
        config: Settings of the run, to compare with the stored ones.

    Returns:
        The position of the run.

    Raises:
        UnimetricError: The checkpoint is not one of these objects.
    """
    tensors, notes = read_tensors(path)
    if config is not None:
        check_settings(config, notes, path)
    try:
        if precision is not None and notes.get("scale"):  # old checkpoints and most precisions have none
            precision.load_state_dict(notes["scale"])
        return _restore_all(tensors, notes, parts, optimizers)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:  # other shapes or parts, altered notes
        reason = (str(error) or type(error).__name__).splitlines()[-1].strip()
        raise UnimetricError(
            f"{path}: does not fit the run any more: {reason}",
            "the dataset or the settings have changed; remove the file to restart from scratch",
        ) from error


def _restore_all(tensors: dict[str, Tensor], notes: dict[str, Any], parts: dict[str, Any], optimizers: dict[str, Any]) -> dict[str, Any]:
    for key, (_, shard) in _shards(parts, optimizers).items():
        for name in [name for name in tensors if f"{name}/".startswith(f"{key}/") and tensors[name].dim()]:
            if len(tensors[name]) != shard.total:
                raise ValueError(f"`{name}` has {len(tensors[name])} rows, not {shard.total}")
            tensors[name] = tensors[name][shard.start : shard.stop]
    for name, part in parts.items():
        part.load_state_dict(dict(_under(tensors, name)))
    for name, optimizer in optimizers.items():
        moments = _read_moments(tensors, notes, name, optimizer)
        optimizer.load_state_dict({"state": moments, "param_groups": notes["groups"][name]})
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    progress = notes["progress"]
    if not all(isinstance(progress.get(key, 0), int) and progress.get(key, 0) >= 0 for key in ("epoch", "step")):
        raise ValueError("`epoch` and `step` must be integers of at least 0")
    return progress


def _read_moments(tensors: dict[str, Tensor], notes: dict[str, Any], name: str, optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer by the index of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments: dict[int, dict[str, Any]] = {}
    for index, numbers in _under(notes["numbers"], name):
        moments.setdefault(int(index), {}).update(numbers)
    for location, value in _under(tensors, name):
        index, key = location.split("/")
        parameter = parameters[int(index)]
        if value.shape == parameter.shape:  # a fused optimizer requires the memory format of the parameter
            value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        moments.setdefault(int(index), {})[key] = value
    return moments


def _under(items: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the items whose key starts with `NAME/`, without that prefix."""
    for key, value in items.items():
        if key.startswith(f"{name}/"):
            yield key.removeprefix(f"{name}/"), value
