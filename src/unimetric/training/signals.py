"""Stop a run at a step boundary when it receives SIGINT or SIGTERM."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from unimetric.images.workers import SIGNALS


class Signals:
    """Context in which SIGINT and SIGTERM only request a stop.

    A second SIGINT, from the keyboard, has its usual effect. A second SIGTERM has none: a scheduler sends one to every
    process of a study, whose main process sends another one to its runs.
    """

    def __init__(self) -> None:
        self.requested = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in SIGNALS:
            try:
                self.before[number] = signal.signal(number, self._request)
            except ValueError:  # not the main thread, which handles signals
                break
        return self

    def stop_requested(self, fabric: Any, step: int = 0) -> bool:
        """Return whether any rank has received a stop signal.

        With several ranks, only every 50th step is checked, because the all-reduce synchronizes with the GPU.
        All ranks must check at the same step, or they deadlock.

        Args:
            fabric: Fabric of the run.
            step: Number of finished steps of the epoch.
        """
        if fabric.world_size == 1:
            return self.requested
        if step % 50:
            return False
        requests = torch.tensor(float(self.requested), device=fabric.device)
        return fabric.all_reduce(requests, reduce_op="sum").item() > 0

    def _request(self, number: int, frame: object) -> None:
        self.requested = True
        if number != signal.SIGTERM:
            signal.signal(number, self.before[number])
        # An evaluation may take half a minute until the run can stop. `print` is not allowed in a signal handler.
        os.write(2, b"\nstopping at the next checkpoint; press Ctrl-C again to stop now, without one\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
