"""Lightning Fabric, by whichever of its two names is installed.

Alone (`lightning-fabric`, which we ask for) it is there in half the time: inside `lightning` it imports torchmetrics to read its version.
"""

from __future__ import annotations

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

__all__ = ["VERSION", "CSVLogger", "Fabric", "TensorBoardLogger"]
