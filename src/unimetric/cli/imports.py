"""Import of large packages without garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import PyTorch without garbage collection, and exempt its objects from later ones.

    PyTorch and the packages around it create half a million objects, most of which exist until the process ends. Searching them for
    garbage takes a sixth of the import. Without effect if PyTorch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
