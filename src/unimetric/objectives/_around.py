"""Base of objectives around another one, whose members they have unless they change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from unimetric.kinds import Objective, Output
from unimetric.spec import create


def _inner(name: str) -> Any:
    """Return a property whose value is that of the inner objective."""
    return property(lambda self: getattr(self.inner, name))


class Around(Objective):
    """Objective around another one, which has all of its members.

    Args:
        objective: Spec string of the inner objective.
        provided: Arguments that the run provides to it.
    """

    views: int = _inner("views")
    reads: tuple[str, ...] = _inner("reads")
    one_pass: bool = _inner("one_pass")
    whole_batch: bool = _inner("whole_batch")
    optimizers: Mapping[str, torch.optim.Optimizer] = _inner("optimizers")

    def __init__(self, objective: str, **provided: Any) -> None:
        super().__init__()
        self.inner = create("objectives", objective, **provided)

    def meet(self, model: Any) -> None:
        self.inner.meet(model)

    def begin(self) -> None:
        self.inner.begin()

    def forward_pass(self, model: Any, images: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self.inner.forward_pass(model, images)

    def backward_pass(self, loss: Tensor, backward: Callable[[Tensor], None]) -> None:
        self.inner.backward_pass(loss, backward)

    def stepped(self) -> None:
        self.inner.stepped()

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        return self.inner(output, labels)
