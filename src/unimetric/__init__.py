"""Unimetric: train and evaluate image embeddings for unseen classes, shifts and datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unimetric import (
        adapters,
        audits,
        backbones,
        datasets,
        formats,
        heads,
        losses,
        metrics,
        miners,
        objectives,
        optimizers,
        samplers,
        schedules,
        splits,
        stores,
        transforms,
    )
    from unimetric.analysis.evaluate import evaluate
    from unimetric.config import load
    from unimetric.deploy.index import Index
    from unimetric.errors import UnimetricError
    from unimetric.geometry.space import Space
    from unimetric.spec import create
    from unimetric.training.capture import compiled
    from unimetric.training.loop import train

__version__ = "0.1.0"
__all__ = [
    "Index",
    "Space",
    "UnimetricError",
    "adapters",
    "audits",
    "backbones",
    "compiled",
    "create",
    "datasets",
    "evaluate",
    "formats",
    "heads",
    "load",
    "losses",
    "metrics",
    "miners",
    "objectives",
    "optimizers",
    "samplers",
    "schedules",
    "splits",
    "stores",
    "train",
    "transforms",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `unimetric --help` does not load torch."""
    if name == "Index":
        from unimetric.deploy.index import Index

        return Index
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
    if not name.startswith("_"):
        from unimetric.spec import KINDS, open_folder

        if name in KINDS:
            return open_folder(name)
    raise AttributeError(f"module `unimetric` has no `{name}`")


def __dir__() -> list[str]:
    """List the public names and the folders of components."""
    return sorted({*globals(), *__all__})
