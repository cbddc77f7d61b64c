"""Stop a run at a step boundary when it receives SIGINT or SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from unimetric.images.workers import SIGNALS

#: Seconds between two exchanges of the signals of several ranks. Schedulers wait for about 30 seconds until they kill a run.
_SECONDS = 5.0


class Signals:
    """Context in which SIGINT and SIGTERM only request a stop.

    A second SIGINT, from the keyboard, has its usual effect. A second SIGTERM has none: a scheduler sends one to every
    process of a study, whose main process sends another one to its runs.
    """

    def __init__(self) -> None:
        self.requested = False
        self.before: dict[int, Any] = {}
        self.interval = 1  # steps between two exchanges of several ranks
        self.steps = 0  # steps since the last one
        self.checked = time.monotonic()  # its time

    def __enter__(self) -> Signals:
        for number in SIGNALS:
            try:
                self.before[number] = signal.signal(number, self._request)
            except ValueError:  # not the main thread, which handles signals
                break
        return self

    def stop_requested(self, fabric: Any, *, after_step: bool = False) -> bool:
        """Return whether any rank has received a stop signal.

        Several ranks exchange their signals after an epoch, and in between about every 5 seconds, because this synchronizes with
        the GPU. All must do so after the same step, or they deadlock. So the first rank chooses the number of steps.

        Args:
            fabric: Fabric of the run.
            after_step: Whether a step has ended, and not an epoch.
        """
        if fabric.world_size == 1:
            return self.requested
        self.steps += after_step
        if after_step and self.steps < self.interval:
            return False
        requests = fabric.all_reduce(torch.tensor(float(self.requested), device=fabric.device), reduce_op="sum").item()
        now = time.monotonic()
        if after_step:  # an evaluation precedes the end of an epoch
            fitting = int(_SECONDS * self.steps / max(now - self.checked, 1e-3))
            # At most twice as many, because the first steps may be faster than the others: their images are loaded ahead.
            self.interval = fabric.broadcast(max(1, min(fitting, 2 * self.interval)))
        self.steps, self.checked = 0, now
        return requests > 0

    def _request(self, number: int, frame: object) -> None:
        self.requested = True
        if number != signal.SIGTERM:
            signal.signal(number, self.before[number])
        # An evaluation may take half a minute until the run can stop. `print` is not allowed in a signal handler.
        os.write(2, b"\nstopping at the next checkpoint; press Ctrl-C again to stop now, without one\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
