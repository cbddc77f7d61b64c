"""Histograms of all pairwise distances within a set, and within subsets of it, from one matrix product."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

#: The bin of what is no pair: a point with itself, or a pair that is there already.
NO_PAIR = 63


def pair_histograms(
    points: Float[Tensor, "S D"], subsets: Int[Tensor, "m B"], *, bins: int
) -> tuple[Float[Tensor, "bins"], Float[Tensor, "m bins"], Float[Tensor, ""]]:
    """Histograms, each of sum 1, of the Euclidean distances within a set of unit vectors and within subsets of it; and the bins' width.

    All share the bins of the whole set, from its smallest distance to its largest. Every pair is put into its bin once; the subsets look
    theirs up.

    Args:
        points: unit vectors.
        subsets: positions in `points`.
        bins: how many, at most 60.
    """
    # float64 on a GPU, where it costs nothing at this size and TF32 cannot touch it.
    points = points.double() if points.is_cuda else points
    strips, diagonal, extra, base = _layout(len(points), 4 if points.is_cuda else 8, points.device)
    distance = points.new_empty(len(extra)) if points.is_cuda else _scratch(len(extra), points.dtype)
    # A CPU's product of flat blocks is by a third faster where the second factor lies as it is read.
    turned = points.T.contiguous()
    for top, bottom, start, end in strips:
        block = distance[start:end].view(bottom - top, -1)
        torch.addmm(block, points[top:bottom], turned[:, top:], beta=0, alpha=-2, out=block)
    distance[diagonal] = distance[1].clone()  # the distance of a point from itself is no part of the range
    distance.add_(2).clamp_min_(0).sqrt_()
    low, high = distance.aminmax()
    width = (high - low) / bins
    scale = torch.where(width > 0, 1 / width, 0)
    bin_of = distance.sub_(low).mul_(scale).to(torch.uint8).clamp_max_(bins - 1).bitwise_or_(extra)
    ordered = subsets.T.int().sort(0).values  # (B, m); a pair lies in the upper triangle if its columns ascend
    first, second = _pairs(*ordered.shape, points.device)
    places = base[ordered].flatten().index_select(0, first).add_(ordered.flatten().index_select(0, second))
    looked_up = bin_of.index_select(0, places).view(-1, ordered.shape[1])
    count = count_by_comparison if points.is_cuda else count_by_table
    return _normalize(count(bin_of[:, None])[0, :bins]), _normalize(count(looked_up)[:, :bins]), width


def count_by_comparison(bin_of: UInt8[Tensor, "P m"]) -> Int[Tensor, "m 64"]:
    """How often each bin occurs in each column; for GPUs.

    torch's bincount waits for the device to learn the largest bin, and atomic additions would queue up at so few bins.
    """
    return (bin_of.T[:, None, :] == torch.arange(64, device=bin_of.device)[:, None]).sum(-1)


def count_by_table(bin_of: UInt8[Tensor, "P m"]) -> Int[Tensor, "m 64"]:
    """How often each bin occurs in each column; for CPUs."""
    pairs, columns = bin_of.shape
    if columns == 1 and pairs % 2 == 0:
        # Two bins make one 16-bit number: half as many to count, in a table of pairs.
        table = torch.bincount(bin_of[:, 0].view(torch.int16), minlength=64 * 256)[: 64 * 256].view(64, 256)[:, :64]
        return (table.sum(0) + table.sum(1))[None]
    offset = torch.arange(0, 64 * columns, 64, dtype=torch.int32)
    return torch.bincount((bin_of + offset).flatten(), minlength=64 * columns).view(columns, 64)


def _normalize(counts: Int[Tensor, "*m bins"]) -> Float[Tensor, "*m bins"]:
    return counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)


@lru_cache(maxsize=4)
def _layout(size: int, parts: int, device: torch.device) -> tuple[list[tuple[int, int, int, int]], Tensor, Tensor, Tensor]:
    """The upper triangle of a matrix in horizontal strips, one after another in memory, each from its own diagonal block to the right.

    Returns each strip (first row, last row, start, end), where the diagonal lies, the mark of what lies below or on it, and of each row
    the place of column 0.
    """
    step = -(-size // parts)
    strips, base, start = [], [], 0
    for top in range(0, size, step):
        bottom, columns = min(top + step, size), size - top
        strips.append((top, bottom, start, start + (bottom - top) * columns))
        base.append(start - top + torch.arange(bottom - top) * columns)
        start += (bottom - top) * columns
    base_of_row = torch.cat(base)
    extra = torch.zeros(start, dtype=torch.uint8)
    for top, bottom, begin, end in strips:
        block = extra[begin:end].view(bottom - top, -1)
        block[:, : bottom - top].masked_fill_(torch.ones(bottom - top, bottom - top, dtype=torch.bool).tril(), NO_PAIR)
    diagonal = base_of_row + torch.arange(size)
    return strips, diagonal.to(device), extra.to(device), base_of_row.int().to(device)


@lru_cache(maxsize=4)
def _pairs(size: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every pair of rows of a (size, columns) matrix, in each of its columns: places in the flat matrix, which is read much faster."""
    places = torch.triu_indices(size, size, 1)[:, :, None] * columns + torch.arange(columns)
    first, second = places.flatten(1)
    return first.to(device), second.to(device)


@lru_cache(maxsize=2)
def _scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Room for the distances on the CPU, kept: fresh memory of a few megabytes costs as much as the arithmetic does."""
    return torch.empty(size, dtype=dtype)
