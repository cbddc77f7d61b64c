"""Weights as safetensors files.

With an adapter, frozen weights are not saved but identified by a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unimetric.errors import UnimetricError, closest
from unimetric.files import atomic, system_error
from unimetric.runs.model import Model

FINGERPRINT = "frozen.fingerprint"


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
        """SHA-256 of the frozen tensors with their names, as (32,) bytes. They do not change."""
        state = self.model.state_dict()
        return torch.tensor(list(hash_tensors({name: state[name] for name in self.model.frozen})), dtype=torch.uint8)

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
    _write_copies(path, _copy_to_host(tensors), json.dumps(notes))


def _copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that share no memory with the tensors or with each other."""
    plain = torch.contiguous_format
    return {key: value.detach().to("cpu", copy=True, memory_format=plain) for key, value in tensors.items()}


def _write_copies(path: Path, tensors: dict[str, Tensor], notes: str) -> None:
    with atomic(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(tensors, temporary, {"notes": notes, "sha256": hash_tensors(tensors, notes).hex()})
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise system_error(error) from None
        temporary.chmod(mode)  # safetensors writes files that only the owner can read


#: Functions that draw or truncate random values in place. Other functions of `nn.init` call the methods.
_DRAWS = {Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_}


class Undrawn(TorchFunctionMode):
    """Context in which no parameters are drawn, for models that are loaded or only checked.

    Drawing the parameters of ViT-S takes two seconds of a CPU core, and those of ViT-B seven, most of it in the inverse error function
    of truncated normal values. Buffers are drawn, because a state need not contain them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the parameter unchanged instead of calling a function that draws its values."""
        values = kwargs or {}
        if func in _DRAWS:
            tensor = args[0] if args else values["tensor"]  # the functions of `nn.init` pass it by name
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **values)


class TensorWriter:
    """Writer of tensors in a thread, so that training need not wait for the disk.

    It writes one file at a time. Leaving its context waits for the last one.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def write(self, path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Copy tensors, and start to write the copies as `write_tensors` does.

        Args:
            path: File to write.
            tensors: Tensors by name. They may change afterwards.
            notes: Notes (JSON).
        """
        self.wait()
        self._pending = self._pool.submit(_write_copies, path, _copy_to_host(tensors), json.dumps(notes))

    def wait(self) -> None:
        """Wait until the last file is complete; raise an error if it cannot be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:  # otherwise, the error of the run is the one to report
            self.wait()


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
