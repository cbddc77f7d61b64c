"""Unimetric: one image embedding that still works on classes, shifts and datasets it has never seen, and the proof of it."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Space", "UnimetricError", "create", "evaluate", "load", "train"]

_HOMES = {
    "Space": "unimetric.metrics",
    "UnimetricError": "unimetric.errors",
    "create": "unimetric.spec",
    "evaluate": "unimetric.engine.evaluate",
    "load": "unimetric.config",
    "train": "unimetric.engine.train",
}


def __getattr__(name: str) -> Any:
    """The public names, fetched when they are asked for: `unimetric --help` need not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module `unimetric` has no `{name}`")
