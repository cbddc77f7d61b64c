"""What an adapter leaves as it was: it is not saved, but known again by its fingerprint."""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from torch import Tensor

from unimetric.engine.model import Model
from unimetric.errors import UnimetricError, closest

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
