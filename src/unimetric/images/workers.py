"""Processes that load images, and signals: a signal to all processes is handled by the run alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: What a scheduler, or a keyboard, sends to all processes of a run.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def block_signals() -> Iterator[None]:
    """Workers that start in here do not hear a signal before they are `apart`; the run hears it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def isolate_worker(worker: int) -> None:
    """In a group of its own: a signal to all is the run's to answer, which saves itself first and would end if a worker died of it."""
    if not hasattr(os, "setpgid"):  # Windows
        return
    os.setpgid(0, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # and forget what was held back
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the loader ends it
