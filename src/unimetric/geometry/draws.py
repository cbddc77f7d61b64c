"""Random draws from a saved counter, identical on all devices and ranks.

Every checkpoint saves the counter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class CounterRNG(nn.Module):
    """Uniform random numbers from a hash of (seed, draw, row).

    The numbers are identical on every device and every rank, and they resume with a checkpoint. The
    generators of torch provide none of this. CPU and GPU draw differently; each rank would mine
    other triplets and so train other proxies; a generator object breaks `fullgraph=True`. Here the
    state is one counter, a buffer in every checkpoint.

    Args:
        seed: Number of the sequence. A run sets it with `seed_dice`. Components that may contain
            one another start with different seeds. With equal numbers, rho would switch exactly the
            triplets whose positive comes first.
    """

    state: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", torch.tensor([seed, 0], dtype=torch.int64))

    def forward(self, count: int) -> Float[Tensor, " count"]:
        """Return `count` numbers in [0, 1)."""
        if self.state.device.type == "cpu" and not torch.compiler.is_compiling():
            # For so few numbers, call overhead dominates, and numpy calls cost a tenth as much.
            seed, counter = self.state.tolist()
            self.state[1] += 1
            key = (seed * 0x9E3779B1 + counter * 0x85EBCA6B) & _MASK
            state = _mix((np.arange(count) + key) & _MASK)
            return torch.from_numpy((state >> 8).astype(np.float32) * np.float32(2.0**-24))
        rows = torch.arange(count, device=self.state.device, dtype=torch.int64)
        # Each draw uses a separate range of the 32-bit integers. The ranges are far apart, because
        # their starts are multiples of an odd number near the golden section. Rows are only added:
        # a compiler that counts them in 32 bits could not multiply them by a large number.
        key = self.state[0] * 0x9E3779B1 + self.state[1] * 0x85EBCA6B
        self.state[1] += 1
        return uniform(rows + (key & _MASK))


_MASK = 0xFFFFFFFF


def uniform(*keys: Tensor) -> Tensor:
    """Return a number in [0, 1) with 24 random bits, hashed from integer keys.

    The hash applies the avalanche step of MurmurHash3 to one key after another. It stays within 32
    bits of an int64, where no product overflows on any device.
    """
    state = torch.zeros((), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((state * 0x01000193 + key) & _MASK)
    return (state >> 8).to(torch.float32) * 2.0**-24


def _mix(x: Any) -> Any:
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK  # a factor under 2^31: int64 products do not overflow
    return x ^ (x >> 16)


def seed_dice(module: nn.Module, seed: int) -> None:
    """Assign a distinct sequence to every `CounterRNG` in a module, all derived from one seed."""
    generators = [child for child in module.modules() if isinstance(child, CounterRNG)]
    for number, generator in enumerate(generators):
        generator.state[0] = seed * 1_000_003 + number


def draw(weights: Float[Tensor, "B R"] | Bool[Tensor, "B R"], numbers: Float[Tensor, "B"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    """Draw one column per row, with probability proportional to its weight.

    Inverts the cumulative sum, so that one random number per row suffices and no B x R noise is
    created.

    Args:
        weights: Nonnegative weight of each column.
        numbers: One random number in [0, 1) per row, on any device.

    Returns:
        The drawn columns, and whether each row has any weight.
    """
    total = weights.cumsum(-1, dtype=torch.float32 if weights.dtype == torch.bool else None)
    last = total[:, -1:]
    # A product that rounds up to the total would select a column past the last one with weight.
    numbers = numbers.to(total, non_blocking=True)  # a loss without parameters may have stayed on the CPU
    target = torch.minimum(numbers[:, None] * last, last * (1 - torch.finfo(total.dtype).eps))
    return torch.searchsorted(total, target, right=True)[:, 0].clamp_max(weights.shape[1] - 1), last[:, 0] > 0
