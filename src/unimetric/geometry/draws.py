"""Random draws from a counter that is saved with a checkpoint: the same on every device and every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class CounterRNG(nn.Module):
    """Uniform numbers from a hash of (seed, throw, row): the same on every device and every rank, and resumable.

    torch's generators are none of that: CPU and GPU draw differently, each rank would mine other triplets and so learn other proxies,
    and a generator object breaks `fullgraph=True`. Here the state is one counter, a buffer that lies in every checkpoint.

    Args:
        seed: numbers the sequence; a run sets it by `seed_dice`. Parts that may stand inside one another start with different ones: by
            the same numbers rho would switch just those triplets whose positive stands first.
    """

    state: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", torch.tensor([seed, 0], dtype=torch.int64))

    def forward(self, count: int) -> Float[Tensor, "count"]:
        """`count` numbers in [0, 1)."""
        if self.state.device.type == "cpu" and not torch.compiler.is_compiling():
            # The same arithmetic by numpy, whose calls cost a tenth: so few numbers are all overhead.
            seed, throw = self.state.tolist()
            self.state[1] += 1
            key = (seed * 0x9E3779B1 + throw * 0x85EBCA6B) & _MASK
            return torch.from_numpy(_fraction(_mix((np.arange(count) + key) & _MASK)))
        rows = torch.arange(count, device=self.state.device, dtype=torch.int64)
        # Each throw has a stretch of the 32-bit numbers of its own, and stretches lie far apart: multiples of an odd number near the golden
        # section do. Rows are only added, since a compiler that counts them in 32 bits could not multiply them by a large number.
        key = self.state[0] * 0x9E3779B1 + self.state[1] * 0x85EBCA6B
        self.state[1] += 1
        return uniform(rows + (key & _MASK))


_MASK = 0xFFFFFFFF


def uniform(*keys: Tensor) -> Tensor:
    """A number in [0, 1) from integer keys, 24 bits of it: the avalanche of MurmurHash3 over the keys one after another.

    Held within 32 bits of an int64, where no product overflows on any device.
    """
    state = torch.zeros((), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((state * 0x01000193 + key) & _MASK)
    return (state >> 8).to(torch.float32) * 2.0**-24


def _fraction(state: np.ndarray) -> np.ndarray:
    return (state >> 8).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: Any) -> Any:
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B)):  # both factors under 2^31: int64 products do not overflow
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def seed_dice(module: nn.Module, seed: int) -> None:
    """Give every dice below a module a sequence of its own, all from one seed."""
    dice = [part for part in module.modules() if isinstance(part, CounterRNG)]
    for number, part in enumerate(dice):
        part.state[0] = seed * 1_000_003 + number


def draw(weights: Float[Tensor, "B R"] | Bool[Tensor, "B R"], numbers: Float[Tensor, "B"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    """One column a row, with probability proportional to its weight; and whether the row had any weight.

    By the inverse of the cumulative sum, so that one number a row is enough and no B x R noise is made.
    """
    weights = weights.to(torch.float32) if weights.dtype == torch.bool else weights
    total = weights.cumsum(-1)
    last = total[:, -1:]
    # The number may round up to the total itself: the first column that reaches the total is the last one with weight.
    target = torch.minimum(numbers[:, None].to(total.dtype) * last, last * (1 - torch.finfo(total.dtype).eps))
    return torch.searchsorted(total, target, right=True)[:, 0].clamp_max(weights.shape[1] - 1), last[:, 0] > 0
