"""The miner of a loss."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.fit import check_mined
from unimetric.spec import create


def resolve_miner(loss: Any, miner: str | nn.Module | None) -> Any:
    """Return the miner of a loss: the given one, or its `default_miner`.

    Raises:
        UnimetricError: The loss does not read the tuples that the miner `gives`.
    """
    built = create("miners", miner or loss.default_miner)
    only = loss.needs_triplets if loss.needs_triplets and getattr(loss, loss.needs_triplets) else ""
    reads = [kind.__name__ for kind in loss.reads]
    check_mined(type(loss).__name__, reads, type(built).__name__, built.gives.__name__, default=loss.default_miner, only=only)
    return built
