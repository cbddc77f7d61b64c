"""Device, precision and strategy of a run, by Lightning Fabric.

Either package that contains Fabric is accepted. `lightning-fabric` is the dependency: `lightning` requires torchmetrics, which takes
as long to import as PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import cache_folder

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]


if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.loggers import CSVLogger, TensorBoardLogger
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    VERSION = ""
else:
    try:
        # Fabric imports torchmetrics, where it is installed, only to compare its version. None makes that import fail.
        hidden = sys.modules.setdefault("torchmetrics", None) is None
        try:
            # `pytorch-lightning` contains the same package, so its version is not always that of a distribution `lightning-fabric`.
            from lightning_fabric import Fabric
            from lightning_fabric import __version__ as VERSION
            from lightning_fabric.loggers import CSVLogger, TensorBoardLogger
            from lightning_fabric.plugins.environments import LightningEnvironment
            from lightning_fabric.strategies import DDPStrategy
        finally:
            if hidden:
                del sys.modules["torchmetrics"]
    except ImportError:  # only `lightning` is installed
        from lightning import __version__ as VERSION
        from lightning.fabric import Fabric
        from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.fabric.strategies import DDPStrategy


__all__ = ["VERSION", "CSVLogger", "DDPStrategy", "Fabric", "TensorBoardLogger", "evaluation_batch", "open_fabric", "set_up"]


# Lightning and inductor suggest a lower precision of float32 products, which would change results. Silence both:
# Lightning logs it when it sets up a GPU (`accelerators/cuda.py`), inductor at its first compilation (`compile_fx.py`).
def _silence_lightning() -> None:
    # All of Lightning's packages log through the logger of the one that was imported last.
    for name in ("lightning_fabric", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)


_silence_lightning()
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")


def open_fabric(config: RunConfig, *, loggers: Any = None, several: bool = False) -> Fabric:
    """Open the device with the precision and strategy of the settings.

    Args:
        config: Settings of the run.
        loggers: Loggers of Lightning.
        several: Whether to use all devices of the settings. Evaluation uses one.

    Raises:
        UnimetricError: The device does not exist or does not support the settings.
    """
    accelerator, _, devices = config.device.partition(":")
    cuda = torch.cuda.is_available() and accelerator in ("auto", "cuda", "gpu")
    if accelerator in ("cuda", "gpu") and not cuda:
        raise UnimetricError(f"`device = {config.device!r}` requires a CUDA device", "use `device = 'cpu'` or `device = 'auto'`")
    _silence_lightning()
    _keep_compiled()
    # From torch 2.11 on, cuDNN computes attention on H100, H200 and B200. Its results are sometimes wrong or not finite (pytorch/pytorch
    # issues 166211, 193893, 196678). Probably for that reason, three of eight starts of a ViT on a busy H200 had NaN before the first step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    precision = config.precision if config.precision != "auto" else ("bf16-mixed" if cuda else "32-true")
    if not cuda:
        keep_freed_memory()
        _settle_kernels(precision)
    try:
        wanted = int(devices) if devices else 1
        count = wanted if several else 1
        return Fabric(
            accelerator="cuda" if cuda else ("cpu" if accelerator == "auto" else accelerator),
            devices=count,
            precision=precision,
            strategy=config.strategy if several else "auto",
            loggers=loggers,
            # One device is not part of a cluster. Fabric would search for one, and initialize MPI where mpi4py is installed.
            plugins=LightningEnvironment() if count == 1 else None,
        )
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise UnimetricError(f"cannot open the device: {error}", "check `device`, `precision` and `strategy`") from None


def _keep_compiled() -> None:
    """Keep compiled graphs in the cache folder of the user, where they survive a restart.

    PyTorch keeps them in a temporary folder. A folder that the user has chosen, for PyTorch or for the cache,
    may be shared with others, whose graphs would run here.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ or os.environ.get("UNIMETRIC_CACHE"):
        return
    folder = cache_folder() / "compiled"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _settle_kernels(precision: str) -> None:
    """Decide before the first step whether products on this CPU use oneDNN.

    On an ARM CPU without bfloat16, PyTorch disables it for the whole process at the first product in bfloat16. Without this decision,
    a resumed run would be rounded differently.
    """
    if platform.machine() == "aarch64" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        backends: Any = torch.backends  # its type stubs lack the settings of oneDNN
        backends.mkldnn.enabled = not precision.startswith("bf16")


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, instead of mapping it again for each layer.

    By default it maps every large tensor separately, and the kernel clears each page at its first use. With a convolutional network on a
    CPU, that takes as long as the network itself. Memory beyond 1 GiB at the end of the heap still goes back to the system.
    """
    most_maps, trim_above = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    _set_allocator({most_maps: 0, trim_above: 2**30})


def share_heap() -> None:
    """Let all threads that start later allocate from the heap of the main thread.

    The heaps of other threads are small, so that the C library returns the activations of each batch to the system. Getting their pages
    again takes a third of the time of a model on the CPU.
    """
    most_heaps = -8  # M_ARENA_MAX
    _set_allocator({most_heaps: 1})


def _set_allocator(parameters: Mapping[int, int]) -> None:
    """Set parameters of the C library's allocator, if it is that of GNU."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError):  # another C library
            for name, value in parameters.items():
                ctypes.CDLL(None).mallopt(name, value)


def set_up(fabric: Fabric, model: Any) -> Any:
    """Return a model on its device in the precision of the run; a frozen model is only moved."""
    trained = any(parameter.requires_grad for parameter in model.parameters())
    return fabric.setup(model) if trained else model.to(fabric.device)


def evaluation_batch(config: RunConfig, fabric: Fabric) -> int:
    """Return the number of images per batch in evaluation.

    On a CPU, a large batch takes no less time than a small one, but its activations take gigabytes.

    Args:
        config: Settings of the run; see `evaluate_batch`.
        fabric: Device of the run.
    """
    return config.evaluate_batch or (256 if fabric.device.type == "cuda" else 32)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GiB.

    On a GPU this is the memory that torch has reserved, without the CUDA context. On a CPU it is the resident memory.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_reserved(device) / 2**30, 3)
    if resource is None:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
