"""What every test shares: shapes are checked at run time, letters are drawn once, one thread a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("UNIMETRIC_CACHE", str(Path(__file__).parents[1] / ".venv" / "cache"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: more threads only wait for each other


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
