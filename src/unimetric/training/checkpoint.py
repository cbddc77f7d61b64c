"""Save everything that a run needs to resume, in one safetensors file. It contains no code, and is written atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.runs.weights import read_tensors, write_tensors


def save(path: Path, *, parts: dict[str, Any], optimizers: dict[str, Any], progress: dict[str, Any], precision: Any | None = None) -> None:
    """Write a checkpoint.

    Args:
        path: the file.
        parts: whatever has a `state_dict()` of tensors: model, objective, sampler.
        optimizers: their moments go in as tensors, their groups' numbers as a note.
        progress: where the run stands; plain numbers and texts.
        precision: Fabric's plugin; that of `16-mixed` has a state, the scale of the loss, which is plain numbers.
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
    scale = precision.state_dict() if precision is not None else {}
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    write_tensors(path, tensors, {"progress": progress, "groups": groups, "numbers": numbers, "scale": scale})


def restore(path: Path, *, parts: dict[str, Any], optimizers: dict[str, Any], precision: Any | None = None) -> dict[str, Any]:
    """Read a checkpoint back into what `save` was given; returns the progress."""
    tensors, notes = read_tensors(path)
    try:
        if precision is not None and notes.get("scale"):  # older checkpoints have none, and most precisions have nothing in it
            precision.load_state_dict(notes["scale"])
        return _restored(tensors, notes, parts, optimizers)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:  # other shapes, other parts, altered notes
        reason = (str(error) or type(error).__name__).splitlines()[-1].strip()
        raise UnimetricError(
            f"{path}: does not fit the run any more: {reason}",
            "its dataset has changed since, or its settings were edited; remove the file to begin anew",
        ) from error


def _restored(tensors: dict[str, Tensor], notes: dict[str, Any], parts: dict[str, Any], optimizers: dict[str, Any]) -> dict[str, Any]:
    for name, part in parts.items():
        part.load_state_dict({key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")})
    for name, optimizer in optimizers.items():
        owners = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments: dict[int, dict[str, Any]] = {}
        for place, values in notes["numbers"].items():
            owner, _, index = place.partition("/")
            if owner == name:
                moments.setdefault(int(index), {}).update(values)
        for place, value in tensors.items():
            owner, *index_and_key = place.split("/")
            if owner == name:
                index, key = int(index_and_key[0]), index_and_key[1]
                if value.shape == owners[index].shape:  # a fused optimiser wants moments laid out as their weights, channels last on a GPU
                    value = torch.empty_like(owners[index], dtype=value.dtype, device=value.device).copy_(value)
                moments.setdefault(index, {})[key] = value
        optimizer.load_state_dict({"state": moments, "param_groups": notes["groups"][name]})
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    progress = notes["progress"]
    if not all(isinstance(progress.get(key, 0), int) and progress.get(key, 0) >= 0 for key in ("epoch", "step")):
        raise ValueError("it says no epoch and step to go on from")
    return progress
