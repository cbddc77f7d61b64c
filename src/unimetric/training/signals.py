"""Stop a run at a step boundary when it receives SIGINT or SIGTERM."""

from __future__ import annotations

import signal
from typing import Any

import torch

from unimetric.images.workers import SIGNALS


class Signals:
    """While inside, SIGINT and SIGTERM only ask; a second one acts as it always does."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in SIGNALS:
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: whoever owns it handles signals
                break
        return self

    def stop_requested(self, fabric: Any, step: int = 0) -> bool:
        """Whether any rank was asked. One alone knows; several ask each other now and then, since this waits for the device.

        Args:
            fabric: of the run.
            step: they ask in one of fifty; the same one everywhere, or the first to stop would wait for the others for ever.
        """
        if fabric.world_size == 1:
            return self.asked
        return step % 50 == 0 and fabric.all_reduce(torch.tensor(float(self.asked), device=fabric.device), reduce_op="sum").item() > 0

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.signal(number, self.before[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
