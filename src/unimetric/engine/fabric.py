"""Lightning Fabric, from whichever of its two packages is installed.

`lightning-fabric`, the dependency, imports in half the time: `lightning` also imports torchmetrics to read its version.
"""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.loggers import CSVLogger, TensorBoardLogger

    VERSION = ""
else:
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.loggers import CSVLogger, TensorBoardLogger

        VERSION = version("lightning-fabric")  # an ImportError too where `lightning` only lends its name
    except ImportError:
        from lightning.fabric import Fabric
        from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

        VERSION = version("lightning")

# Float32 products stay float32: the hints to lower their precision would change results. Lightning logs its hint when it sets up a GPU
# (`accelerators/cuda.py`), inductor warns at its first compilation, that of the crops (`compile_fx.py`).
for name in ("lightning_fabric", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")

__all__ = ["VERSION", "CSVLogger", "Fabric", "TensorBoardLogger"]
