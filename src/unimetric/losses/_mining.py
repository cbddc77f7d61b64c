"""The miner of a loss."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.fit import miner_misfit
from unimetric.spec import create


def resolve_miner(loss: Any, miner: str | nn.Module | None) -> Any:
    """Return the miner of a loss: the given one, or its `default_miner`.

    Raises:
        UnimetricError: The loss does not read the tuples that the miner `gives`.
    """
    built = create("miners", miner or loss.default_miner)
    if built.gives not in loss.reads:
        reads = [kind.__name__ for kind in loss.reads]
        raise miner_misfit(type(loss).__name__, reads, type(built).__name__, built.gives.__name__, loss.default_miner)
    return built
