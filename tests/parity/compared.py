"""Registers a test as one row of `docs/parity.md`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unimetric.geometry import Pairs, Triplets

VERDICTS = ("equal", "equal with the option", "deviates by choice")


@dataclass(frozen=True)
class Comparison:
    """One method next to the authors' code.

    Args:
        method: Component type and name, as `losses/margin`.
        theirs: Name of the authors' code, and the file and line in it.
        verdict: One of `VERDICTS`.
        flag: Arguments with which the component computes what the authors' code computes; empty for the defaults.
        within: Largest difference, relative to the largest entry of theirs; None if the test compares no numbers.
        note: The difference, in one or two sentences.
    """

    method: str
    theirs: str
    verdict: str
    flag: str
    within: float | None
    note: str


def compared(
    method: str, *, theirs: str, verdict: str = "equal", flag: str = "", within: float | None = 1e-11, note: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a test; its fixture `agree` then uses `within`.

    Args:
        method, theirs, verdict, flag, within, note: As in `Comparison`.
    """
    if verdict not in VERDICTS:
        raise ValueError(f"`verdict` must be one of {VERDICTS}, got {verdict!r}")

    def register(test: Any) -> Any:
        test.comparison = Comparison(method, theirs, verdict, flag, within, note)
        return test

    return register


class Given(nn.Module):
    """A miner that returns the given triplets.

    Args:
        triplets: (anchor, positive, negative) indices.
    """

    gives = Triplets

    def __init__(self, triplets: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.triplets = torch.tensor(triplets)

    def forward(self, similarity: Tensor, pairs: Pairs) -> Triplets:
        return Triplets(*self.triplets.T, torch.ones(len(self.triplets), dtype=torch.bool))


class Numbers(nn.Module):
    """Replaces a component's random numbers by the given ones, returned in turn.

    Args:
        numbers: One tensor per call.
    """

    def __init__(self, *numbers: Tensor) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def forward(self, count: int) -> Tensor:
        number = self.numbers.pop(0)
        assert number.numel() == count
        return number.flatten()


def differentiate(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return a scalar and its gradients, zero for a leaf that it does not depend on."""
    slopes = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
    return [value.detach(), *(torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(leaves, slopes, strict=True))]


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest absolute difference, divided by the largest absolute entry of theirs."""
    ours, theirs = (torch.as_tensor(np.array(x) if isinstance(x, list) else x, dtype=torch.float64).detach() for x in (ours, theirs))
    assert ours.shape == theirs.shape, f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300))
