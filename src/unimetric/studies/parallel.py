"""Number of runs of a study at once on this machine, and the device of each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.images.pack import count_cores

#: Largest number of runs per GPU with `auto`. On an H200, four train 5,700 images per second together, eleven 4,600.
PER_GPU = 4

#: Fraction of the free memory that runs use with `auto`.
USABLE = 0.9

#: GiB of GPU memory per process that torch does not count: the CUDA context and kernels.
CONTEXT = 0.6


def read_parallel(text: str) -> int | str:
    """Read the value of `--parallel`: a number of runs, or `auto`.

    >>> read_parallel("2"), read_parallel("auto")
    (2, 'auto')
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UnimetricError(f"`--parallel` must be `auto` or at least 1, got `{text}`", "use `--parallel 2` or `--parallel auto`")
    return int(text)


class Slots:
    """Slots for the runs of a study on the devices of this machine.

    With `auto`, the first run starts alone. When it has reported its peak memory, as many runs start as fit in 90 %
    of the memory that was free before, at most 4 per GPU, or 1 per two cores on a CPU. The largest peak counts for all runs.

    Runs on a CPU share its cores: each gets an equal number of threads, unless `OMP_NUM_THREADS` is set.

    Args:
        configs: Settings of the runs to start.
        parallel: Number of runs at once, or `auto`.
    """

    def __init__(self, configs: Sequence[RunConfig], parallel: int | str) -> None:
        several = any(device_count(config) > 1 for config in configs)  # such a run uses the machine alone
        self.auto = parallel == "auto" and not several
        self.gpus = visible_gpus() if parallel != 1 and any(map(on_gpu, configs)) else []
        self.free = [0.0] * max(1, len(self.gpus))
        self.peak = 0.0
        self.used: dict[str, int] = {}  # run id -> index of the device
        self.most = 1 if parallel == "auto" else int(parallel)
        if self.auto and self.gpus:
            self.most, self.free = PER_GPU * len(self.gpus), free_gpu_memory()
        elif self.auto:
            self.most, self.free = max(1, count_cores() // 2), [free_memory()]
        self.threads = 0
        if self.most > 1 and not self.gpus and "OMP_NUM_THREADS" not in os.environ:
            self.threads = max(1, count_cores() // min(self.most, len(configs)))

    def find(self) -> int | None:
        """Return the index of the device for the next run, or None if it must wait."""
        if self.used and (len(self.used) >= self.most or (self.auto and not self.peak)):
            return None
        counts = [list(self.used.values()).count(device) for device in range(len(self.free))]
        room = [self._limit(free) - count for free, count in zip(self.free, counts, strict=True)]
        best = room.index(max(room))
        return best if room[best] > 0 or not self.used else None

    def _limit(self, free: float) -> int:
        if not self.auto or not self.peak:
            return self.most
        need = self.peak + CONTEXT * bool(self.gpus)
        return min(PER_GPU if self.gpus else self.most, int(USABLE * free / need))

    def name_gpu(self, config: RunConfig, device: int) -> str:
        """Return the `CUDA_VISIBLE_DEVICES` of a run, or an empty string for the default."""
        if len(self.gpus) < 2 or device_count(config) > 1 or not on_gpu(config):
            return ""
        return self.gpus[device]


def on_gpu(config: RunConfig) -> bool:
    """Return whether a run uses a GPU of this machine."""
    import torch

    return config.device.partition(":")[0] in ("auto", "cuda", "gpu") and torch.cuda.is_available()


def device_count(config: RunConfig) -> int:
    """Return the number of devices of a run: 4 for `cuda:4`."""
    count = config.device.partition(":")[2]
    return int(count) if count.isdecimal() else 1


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names or [str(index) for index in range(torch.cuda.device_count())]


def free_gpu_memory() -> list[float]:
    """Return the free memory of each GPU in GiB.

    A short process reads it: a CUDA context here would take half a GiB of each GPU during the whole study.
    """
    code = "import torch; print(*(torch.cuda.mem_get_info(index)[0] / 2**30 for index in range(torch.cuda.device_count())))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnimetricError(f"`--parallel auto` requires the free memory of the GPU: {reason}", "use a number: `--parallel 2`")
    return [float(word) for word in found.stdout.split()]


def free_memory() -> float:
    """Return the available main memory in GiB, within the limit of the container."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, KeyError):  # only on Linux
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 2**10
    with contextlib.suppress(OSError, ValueError):  # only in a container with a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free / 2**30
