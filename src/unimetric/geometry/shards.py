"""Rows of a parameter that are divided among ranks, and sums over the ranks.

Each rank computes the same loss. The sums are differentiated for that: the gradient of a sum passes unchanged to the part of each
rank, and the gradients of a tensor that every rank has are added. So each rank has the whole gradient of what all ranks
share, and of its own rows. None of it is left to `DistributedDataParallel`, which would average rows of different classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from unimetric.errors import UnimetricError


class Shard(NamedTuple):
    """Rows that a rank holds: those from `start` to before `stop`, of `total`."""

    start: int
    stop: int
    total: int


def bounds(total: int, rank: int, ranks: int) -> Shard:
    """Return the rows of a rank. Ranks differ by at most one row."""
    return Shard(total * rank // ranks, total * (rank + 1) // ranks, total)


def divide(total: int) -> Shard | None:
    """Return the rows of this rank, or None if there is only one rank.

    Args:
        total: Number of rows.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    ranks = distributed.get_world_size()
    if total < ranks:
        raise UnimetricError(f"`sharded=True`: {total} classes cannot be divided among {ranks} processes", "remove `sharded=True`")
    return bounds(total, distributed.get_rank(), ranks)


def hold(whole: Tensor, shard: Shard | None) -> nn.Parameter:
    """Return a parameter with the rows of a shard, or with all of them if it is None."""
    if shard is None:
        return nn.Parameter(whole)
    parameter = nn.Parameter(whole[shard.start : shard.stop].clone())
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard | None:
    """Return which rows of a parameter this rank holds, or None if it holds all of them."""
    return getattr(parameter, "shard", None)


def join(rows: Tensor, total: int) -> Tensor:
    """Return the rows of all ranks on the CPU of the first rank.

    All ranks must call it. Other ranks return their own rows. Rows are sent rank by rank, so that no device holds more than two shards.

    Args:
        rows: Rows of this rank, with the division of `divide`.
        total: Number of rows of all ranks.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    found = []
    for sender in range(ranks):
        start, stop, _ = bounds(total, sender, ranks)
        part = rows.detach().contiguous() if sender == rank else rows.new_empty(stop - start, *rows.shape[1:])
        distributed.broadcast(part, sender)
        if rank == 0:
            found.append(part.cpu())
    return torch.cat(found) if found else rows


class _Sum(torch.autograd.Function):
    """Sum over the ranks, of which each passes the gradient to its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class _Shared(torch.autograd.Function):
    """The tensor itself, whose gradients are added over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        total = slope.clone()
        distributed.all_reduce(total)
        return total


# The compiler runs these between its graphs.


@torch.compiler.disable
def sum_ranks(part: Tensor) -> Tensor:
    """Return the sum of the parts of all ranks, with gradient."""
    return _Sum.apply(part)


@torch.compiler.disable
def share(whole: Tensor) -> Tensor:
    """Return a tensor that each rank compares with its own rows.

    Its gradient is that of all rows.
    """
    return _Shared.apply(whole)


@torch.compiler.disable
def max_ranks(part: Tensor) -> Tensor:
    """Return the largest values over the ranks, without gradient."""
    largest = part.detach().clone()
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return largest
