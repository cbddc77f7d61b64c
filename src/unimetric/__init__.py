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


#: Module of each public name that is not a folder of components.
_HOMES = {
    "Index": "unimetric.deploy.index",
    "Space": "unimetric.geometry.space",
    "UnimetricError": "unimetric.errors",
    "compiled": "unimetric.training.capture",
    "create": "unimetric.spec",
    "evaluate": "unimetric.analysis.evaluate",
    "load": "unimetric.config",
    "train": "unimetric.training.loop",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `unimetric --help` does not load torch."""
    if name in __all__:
        from unimetric.spec import import_name, open_folder

        return import_name(_HOMES[name], name) if name in _HOMES else open_folder(name)
    raise AttributeError(f"module `unimetric` has no `{name}`")


def __dir__() -> list[str]:
    """List the public names and the folders of components."""
    return sorted({*globals(), *__all__})
