"""Weights as safetensors files. With an adapter, frozen weights are not saved but identified by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unimetric.errors import UnimetricError, closest
from unimetric.files import atomic
from unimetric.runs.model import Model

FINGERPRINT = "frozen.fingerprint"


def fingerprint(model: Model) -> Tensor:
    """SHA-256 over the names, types, shapes and bytes of the frozen tensors, as (32,) bytes."""
    digest = hashlib.sha256()
    state = model.state_dict()
    for name in sorted(model.frozen):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


class Trained:
    """A model seen as what of it is trained: a few megabytes with an adapter, all of it without one.

    Args:
        model: as `build_model` makes it.
        place: what to call the file in an error.
    """

    def __init__(self, model: Model, *, place: str = "the checkpoint") -> None:
        self.model, self.place = model, place

    @cached_property
    def fingerprint(self) -> Tensor:
        """Of the frozen tensors; found once, since they stay what they are."""
        return fingerprint(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """What is trained, and with an adapter the fingerprint of what is not."""
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.model.frozen}
        return tensors | ({FINGERPRINT: self.fingerprint} if self.model.frozen else {})

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Fill in what is trained; refused where the frozen weights are not those that it was trained with."""
        tensors = dict(tensors)
        given = tensors.pop(FINGERPRINT, None)
        if given is not None and not torch.equal(given.cpu(), self.fingerprint):
            raise UnimetricError(
                f"{self.place}: the adapter in it was trained inside another backbone: the frozen weights differ",
                "say where the weights lie that it was trained with: `backbone=\"timm(name='...', weights='...')\"`",
            )
        wanted = set(self.model.state_dict()) - (self.model.frozen if given is not None else set())
        odd = sorted(wanted ^ set(tensors))
        if odd:
            raise UnimetricError(f"{self.place}: weights of another model: `{odd[0]}`, and {len(odd) - 1} more", closest(odd[0], wanted))
        try:
            self.model.load_state_dict(tensors, strict=False)
        except RuntimeError as error:  # other shapes
            raise UnimetricError(
                f"{self.place}: weights of another model: {str(error).splitlines()[-1].strip()}",
                "name the `backbone`, `adapter` and `head` that they were trained in, as the run's config.toml had them",
            ) from None


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
