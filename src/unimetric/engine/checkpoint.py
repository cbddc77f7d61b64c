"""Everything that a run needs to go on, in one safetensors file: no code in it, and it is either the old one or the new one."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.files import atomic


def write_arrays(path: Path, *, compressed: bool = False, **arrays: np.ndarray) -> None:
    """An `.npz` file, atomically."""
    with atomic(path) as temporary, open(temporary, "wb") as file:  # by handle: numpy would add .npz to the temporary name
        (np.savez_compressed if compressed else np.savez)(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path, hint: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file; an error with this hint where it is none, or only the beginning of one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise UnimetricError(f"{path}: no such file", hint) from None
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UnimetricError(f"{path}: not an .npz file, or a damaged one: {error}", hint) from None


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Tensors and a JSON note, atomically."""
    with atomic(path) as temporary:
        ready = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        try:
            save_file(ready, temporary, {"notes": json.dumps(notes)})
        except SafetensorError as error:  # how the library reports a full disk
            raise OSError(str(error)) from None
        mask = os.umask(0o077)  # there is no other way to ask for it
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # the library lets nobody else read what it writes


def read_tensors(path: Path, hint: str = "remove the file to begin anew") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; an error with this hint where it is altered."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["notes"])  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UnimetricError(f"{path}: unreadable checkpoint: {error}", hint) from None


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
