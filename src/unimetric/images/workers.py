"""Isolate image-loading processes from signals.

Only the main process of a run handles signals.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: Signals that a scheduler or a keyboard sends to all processes of a run.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def block_signals() -> Iterator[None]:
    """Block signals while workers start.

    A worker stays unaffected until `isolate_worker` runs in it. The main process receives pending
    signals afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def isolate_worker(worker: int) -> None:
    """Move a worker to a separate process group and ignore the signals of the run.

    The main process handles a signal by saving a checkpoint, and would end if a worker died of the
    signal first.
    """
    if not hasattr(os, "setpgid"):  # Windows
        return
    os.setpgid(0, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # also discards pending signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the loader ends workers with SIGTERM
