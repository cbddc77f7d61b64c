"""Start and stop image-loading processes, and isolate them from signals.

Only the main process of a run handles signals.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

#: Signals that a scheduler or a keyboard sends to all processes of a run.
SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: Iterators of loaders whose workers may be running.
_STARTED: WeakSet[Any] = WeakSet()


def start_workers(loader: DataLoader) -> Iterator[Any]:
    """Start the workers of a loader, and return its iterator."""
    with block_signals():
        arriving: Any = iter(loader)
    if loader.num_workers:
        _STARTED.add(arriving)
    return arriving


@atexit.register  # after the import of torch, whose own exit function would make this one do nothing
def _stop_workers() -> None:
    """Stop all workers of this process.

    The traceback of an error keeps a loader alive until the process exits. `multiprocessing` would then terminate its workers, which
    PyTorch reports as another error.
    """
    for arriving in list(_STARTED):
        arriving._shutdown_workers()


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
    signal first. The worker ends with the main process.
    """
    if not hasattr(os, "setpgid"):  # Windows
        return
    os.setpgid(0, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # also discards pending signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the loader ends workers with SIGTERM
    stop_with_parent()


def stop_with_parent() -> None:
    """Send this process SIGTERM when the process that started it ends.

    PyTorch compares the id of the parent, which is that of a fork server if one starts the workers. A fork server does
    not end before its workers, so that a killed run would leave both behind.
    """

    def wait_and_stop() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_and_stop, daemon=True).start()
