"""Pooling and initialization that the heads share."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.errors import UnimetricError


def pool_tokens(tokens: Float[Tensor, "B N C"], pool: str) -> Float[Tensor, "B C"]:
    """Reduce the tokens of an image to one vector.

    Args:
        tokens: Global token, then the spatial positions.
        pool: `summary` for the global token, `mean` or `max` over the spatial positions.

    Returns:
        One vector per image, (B, C).
    """
    if pool == "summary":
        return tokens[:, 0]
    if tokens.shape[1] < 2:
        raise UnimetricError(f"`pool={pool!r}` requires spatial positions, but the backbone returns only a global token", "drop `pool`")
    positions = tokens[:, 1:]
    return positions.mean(1) if pool == "mean" else positions.amax(1)


def init_kaiming(layer: nn.Linear) -> None:
    """Draw weights from a normal distribution of variance 2 / outputs; set the bias to zero."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
