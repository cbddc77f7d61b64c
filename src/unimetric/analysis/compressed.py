"""Smaller embeddings: fewer dimensions, or fewer bits per number."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from unimetric.errors import UnimetricError, closest

#: Precisions, and their bits per number.
PRECISIONS = {"float32": 32, "float16": 16, "int8": 8, "binary": 1}


def check_compression(dims: Sequence[int], precisions: Sequence[str], *, dim: int | None = None, geometry: str = "cosine") -> None:
    """Reject what embeddings cannot be compressed to, before any image is embedded.

    Args:
        dims: Numbers of first dimensions to keep.
        precisions: Names out of `PRECISIONS`.
        dim: Dimension of the embeddings, if it is known.
        geometry: Geometry of the embeddings.
    """
    for name in precisions:
        if name not in PRECISIONS:
            raise UnimetricError(f"unknown precision `{name}`", closest(name, PRECISIONS))
    if min(dims, default=1) < 1:
        raise UnimetricError(f"`dims` must be at least 1, got {min(dims)}", "use `--dims 32,64,128`")
    if dim is not None and max(dims, default=1) > dim:
        raise UnimetricError(f"`dims` must be at most the dimension {dim}, got {max(dims)}", "use smaller `--dims`")
    if (dims or precisions) and geometry != "cosine":
        raise UnimetricError(f"`dims` and `precisions` require cosine similarity, but the run has {geometry}", "remove them")


def compress(
    embeddings: Float[Tensor, "N D"], dims: Sequence[int] = (), precisions: Sequence[str] = ()
) -> Iterator[tuple[str, Float[Tensor, "N d"]]]:
    """Yield smaller embeddings by name, such as `dim=32`, `int8` and `dim=32, int8`.

    `check_compression` must accept the arguments.

    Args:
        embeddings: Raw embeddings.
        dims: Numbers of first dimensions to keep.
        precisions: Names out of `PRECISIONS`. `int8` divides each vector by its largest coordinate; `binary` keeps the signs.
    """
    if "binary" in precisions and not (embeddings < 0).any():
        message = "`binary` keeps the signs, but no coordinate is negative, so all embeddings become equal; add a head, such as `linear`"
        logging.getLogger("unimetric").warning(message)
    for dim in (0, *dims):
        for precision in ("", *precisions):
            name = ", ".join(filter(None, [f"dim={dim}" if dim else "", precision]))
            if name:
                yield name, round_to(embeddings[:, :dim] if dim else embeddings, precision or "float32")


def round_to(embeddings: Float[Tensor, "N D"], precision: str) -> Float[Tensor, "N D"]:
    """Round unit vectors to a precision, and return them in float32.

    >>> round_to(torch.tensor([[0.6, -0.8]]), "binary").tolist()
    [[1.0, -1.0]]
    """
    unit = normalize(embeddings.float())
    if precision == "float16":
        return unit.half().float()
    if precision == "int8":
        step = unit.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return (unit / step).round() * step
    if precision == "binary":
        return torch.where(unit >= 0, 1.0, -1.0)
    return unit
