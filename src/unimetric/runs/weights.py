"""Weights as safetensors files.

With an adapter, frozen weights are not saved but identified by a fingerprint.
"""

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
    """Return the SHA-256 of the frozen tensors with their names, as (32,) bytes."""
    state = model.state_dict()
    return torch.tensor(list(hash_tensors({name: state[name] for name in model.frozen})), dtype=torch.uint8)


def hash_tensors(tensors: dict[str, Tensor], notes: str = "") -> bytes:
    """Return the SHA-256 of a text and of tensors with their names, types and shapes."""
    digest = hashlib.sha256(notes.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


class Trained:
    """The trainable parameters of a model.

    They are a few megabytes with an adapter, and all parameters without one.

    Args:
        model: Model of `build_model`.
        place: Name of the file in errors.
    """

    def __init__(self, model: Model, *, place: str = "the checkpoint") -> None:
        self.model, self.place = model, place

    @cached_property
    def fingerprint(self) -> Tensor:
        """Fingerprint of the frozen tensors, computed once because they do not change."""
        return fingerprint(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trainable parameters, and the fingerprint of frozen ones if there are any."""
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.model.frozen}
        return tensors | ({FINGERPRINT: self.fingerprint} if self.model.frozen else {})

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load the trainable parameters.

        Frozen weights that differ from those of training raise an error.
        """
        tensors = dict(tensors)
        given = tensors.pop(FINGERPRINT, None)
        if given is not None and not torch.equal(given.cpu(), self.fingerprint):
            raise UnimetricError(
                f"{self.place}: the adapter was trained in another backbone: the frozen weights differ",
                "name the weights of its training: `backbone=\"timm(name='...', weights='...')\"`",
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
                "use the `backbone`, `adapter` and `head` of the run's config.toml",
            ) from None


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write tensors, notes (JSON) and the hash of both atomically."""
    with atomic(path) as temporary:
        ready = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        text = json.dumps(notes)
        try:
            save_file(ready, temporary, {"notes": text, "sha256": hash_tensors(ready, text).hex()})
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise OSError(str(error)) from None
        mask = os.umask(0o077)  # the only way to read the mask is to set it
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # safetensors writes files that only the owner can read


def read_tensors(path: Path, hint: str = "remove the file to restart from scratch") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of `write_tensors`.

    A damaged or modified file raises an error with the hint. Files of earlier versions have no hash.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        notes = dict(json.loads(metadata["notes"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UnimetricError(f"{path}: unreadable checkpoint: {error}", hint) from None
    if "sha256" in metadata and metadata["sha256"] != hash_tensors(tensors, metadata["notes"]).hex():
        raise UnimetricError(f"{path}: damaged: the hash of its content differs from the stored one", hint)
    return tensors, notes
