"""How a run and its workers listen to signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: What a scheduler, or a keyboard, sends to all processes of a run.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


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

    def agreed(self, fabric: Any, step: int = 0) -> bool:
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


@contextmanager
def held_back() -> Iterator[None]:
    """Workers that start in here do not hear a signal before they are `apart`; the run hears it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def apart(worker: int) -> None:
    """In a group of its own: a signal to all is the run's to answer, which saves itself first and would end if a worker died of it."""
    if not hasattr(os, "setpgid"):  # Windows
        return
    os.setpgid(0, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # and forget what was held back
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the loader ends it
