"""Import of large packages without garbage collection."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def importing() -> Iterator[None]:
    """Import PyTorch without garbage collection, and exempt its objects from later ones.

    PyTorch and the packages around it create half a million objects, most of which exist until the process ends. Searching them for
    garbage takes a sixth of the import. Without effect if PyTorch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    atexit.register(_hide_leaks)  # registered first, so it runs last
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _hide_leaks() -> None:
    """Hide what extensions print after the last line of Python.

    Triton, since it is built with nanobind, reports all objects that are exempt from garbage collection as leaks, in thirty lines.
    """
    if "triton" in sys.modules:
        with suppress(OSError, ValueError):  # the stream may be closed
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
