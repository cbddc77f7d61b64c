"""What every test shares: shapes are checked at run time, letters are drawn once, one thread a worker."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("UNIMETRIC_CACHE", str(Path(__file__).parents[1] / ".venv" / "cache"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: more threads only wait for each other


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def small_disk() -> Callable[[], AbstractContextManager[None]]:
    """While inside, no file of this process may grow beyond 4 KiB: the system's own limit, and so its own error."""

    @contextmanager
    def limited() -> Iterator[None]:
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limited
