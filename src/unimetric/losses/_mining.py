"""The miner of a loss."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.errors import UnimetricError
from unimetric.spec import create


def resolve_miner(loss: Any, miner: str | nn.Module | None) -> Any:
    """Return the miner of a loss: the given one, or its `default_miner`.

    Raises:
        UnimetricError: The loss does not read the tuples that the miner `gives`.
    """
    built = create("miners", miner or loss.default_miner)
    if built.gives not in loss.reads:
        name, wanted = type(loss).__name__, " or ".join(kind.__name__ for kind in loss.reads)
        raise UnimetricError(
            f"the loss {name} reads {wanted}, but the miner {type(built).__name__} gives {built.gives.__name__}",
            f"leave `miner` out to use {name}'s own, `{loss.default_miner}`",
        )
    return built
