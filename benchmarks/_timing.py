"""Time per call on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: str | torch.device) -> None:
    """Wait until the device has finished."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], object], device: str | torch.device, count: int) -> float:
    """Return milliseconds per call if the host may run ahead of the device, as in training."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        function()
    synchronize(device)
    return 1000 * (time.perf_counter() - begun) / count
