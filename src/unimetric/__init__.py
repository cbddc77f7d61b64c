"""Unimetric: one image embedding that still works on classes, shifts and datasets it has never seen, and the proof of it."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Space", "UnimetricError", "compiled", "create", "evaluate", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `unimetric --help` does not load torch."""
    if name == "Space":
        from unimetric.geometry.space import Space

        return Space
    if name == "UnimetricError":
        from unimetric.errors import UnimetricError

        return UnimetricError
    if name == "compiled":
        from unimetric.training.capture import compiled

        return compiled
    if name == "create":
        from unimetric.spec import create

        return create
    if name == "evaluate":
        from unimetric.analysis.evaluate import evaluate

        return evaluate
    if name == "load":
        from unimetric.config import load

        return load
    if name == "train":
        from unimetric.training.loop import train

        return train
    raise AttributeError(f"module `unimetric` has no `{name}`")
