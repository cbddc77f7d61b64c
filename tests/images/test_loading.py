"""Loading of images by workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from unimetric.images.loading import View, finish_crops
from unimetric.spec import create

#: Two processes that exit while workers run. Both are forks, so that PyTorch is imported once.
EXIT = """
import os
import sys

import numpy as np
import torch

from unimetric.images.loading import Streamed, View
from unimetric.images.table import Table
from unimetric.spec import create

if os.fork() and os.fork():
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) != 2 for _ in range(2)))
paths = tuple(sys.argv[1:])
table = Table(paths, np.zeros(len(paths)), ("a",), np.ones(len(paths), bool))
loader = Streamed(table, device=torch.device("cpu"), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), workers=8)
view = View(create("transforms", "base(size=32, resize=36)"))
batches = loader.load((np.arange(len(paths)), view) for _ in range(100))
next(batches)
sys.exit(2)
"""


def test_exit_stops_running_workers_silently(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(rng.integers(0, 256, (200, 200, 3), np.uint8)).save(tmp_path / f"{number}.png")
    words = [sys.executable, "-W", "ignore", "-c", EXIT, *map(str, tmp_path.iterdir())]
    # Without `_stop_workers`, nearly every exit of these processes prints an error.
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


#: A process whose workers are started by a fork server, as in Python 3.14. It prints the ids of all of them.
SERVED = """
import multiprocessing
import time

from torch.utils.data import DataLoader

from unimetric.images.workers import isolate_worker, start_workers

if __name__ == "__main__":
    loader = DataLoader(range(10**9), num_workers=2, worker_init_fn=isolate_worker, multiprocessing_context="forkserver")
    arriving = start_workers(loader)
    next(arriving)
    print(multiprocessing.forkserver._forkserver._forkserver_pid, *(worker.pid for worker in arriving._workers), flush=True)
    time.sleep(600)
"""


def test_workers_of_a_fork_server_end_with_a_killed_process(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    process = subprocess.Popen([sys.executable, str(tmp_path / "served.py")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = [psutil.Process(int(number)) for number in process.stdout.readline().split()]
    process.kill()
    process.wait()
    left = psutil.wait_procs(started, timeout=20)[1]
    for each in left:
        each.kill()
    assert len(started) == 3 and not left


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_crops_of_workers_are_finished_without_synchronizing() -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device="cuda")
    mean, std = (torch.full((1, 3, 1, 1), value, device="cuda") for value in (0.5, 0.2))
    view = View(create("transforms", "base(size=8, resize=9)"), epoch=0)
    finish_crops(images, np.arange(4), view, mean, std)  # the first call loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        finish_crops(images, np.arange(4), view, mean, std)
    finally:
        torch.cuda.set_sync_debug_mode("default")
