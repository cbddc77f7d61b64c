"""Histograms of pairwise distances within a set and its subsets, from one matrix product."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

#: Bin of entries to ignore: a point with itself, or a pair that is counted already.
NO_PAIR = 63


def pair_histograms(
    points: Float[Tensor, "S D"], subsets: Int[Tensor, "m B"], *, bins: int
) -> tuple[Float[Tensor, " bins"], Float[Tensor, "m bins"], Float[Tensor, ""]]:
    """Compute histograms of the distances within a set of unit vectors and within subsets.

    Distances are Euclidean. All share the bins of the whole set, from its smallest distance to its largest.
    Every pair is assigned to its bin once; the subsets read theirs from that table.

    Args:
        points: Unit vectors.
        subsets: Positions in `points`.
        bins: Number of bins, at most 60.

    Returns:
        The histogram of the set and of each subset, each of sum 1, and the width of a bin.
    """
    # float64 on a GPU: it costs nothing at this size, and TF32 does not apply to it.
    points = points.double() if points.is_cuda else points
    strips, diagonal, extra, base = _layout(len(points), 4 if points.is_cuda else 8, points.device)
    distance = points.new_empty(len(extra)) if points.is_cuda else _scratch(len(extra), points.dtype)
    # On a CPU, products of flat blocks are a third faster if the second factor is contiguous as read.
    turned = points.T.contiguous()
    for top, bottom, start, end in strips:
        block = distance[start:end].view(bottom - top, -1)
        torch.addmm(block, points[top:bottom], turned[:, top:], beta=0, alpha=-2, out=block)
    distance[diagonal] = distance[1].clone()  # the range excludes the distance of a point from itself
    distance.add_(2).clamp_min_(0).sqrt_()
    low, high = distance.aminmax()
    width = (high - low) / bins
    scale = torch.where(width > 0, 1 / width, 0)
    bin_of = distance.sub_(low).mul_(scale).to(torch.uint8).clamp_max_(bins - 1).bitwise_or_(extra)
    ordered = subsets.T.int().sort(0).values  # (B, m); a pair is in the upper triangle if its columns ascend
    first, second = _pairs(*ordered.shape, points.device)
    indices = base[ordered].flatten().index_select(0, first).add_(ordered.flatten().index_select(0, second))
    looked_up = bin_of.index_select(0, indices).view(-1, ordered.shape[1])
    count = count_by_comparison if points.is_cuda else count_by_table
    return _normalize(count(bin_of[:, None])[0, :bins]), _normalize(count(looked_up)[:, :bins]), width


def count_by_comparison(bin_of: UInt8[Tensor, "P m"]) -> Int[Tensor, "m 64"]:
    """Count the occurrences of each bin in each column, on a GPU.

    bincount of torch synchronizes to read the largest bin, and atomic additions would collide in so
    few bins.
    """
    return (bin_of.T[:, None, :] == torch.arange(64, device=bin_of.device)[:, None]).sum(-1)


def count_by_table(bin_of: UInt8[Tensor, "P m"]) -> Int[Tensor, "m 64"]:
    """Count the occurrences of each bin in each column, on a CPU."""
    pairs, columns = bin_of.shape
    if columns == 1 and pairs % 2 == 0:
        # Two bins form one 16-bit number, which halves the numbers to count, in a table of bin pairs.
        table = torch.bincount(bin_of[:, 0].view(torch.int16), minlength=64 * 256)[: 64 * 256].view(64, 256)[:, :64]
        return (table.sum(0) + table.sum(1))[None]
    offset = torch.arange(0, 64 * columns, 64, dtype=torch.int32)
    return torch.bincount((bin_of + offset).flatten(), minlength=64 * columns).view(columns, 64)


def _normalize(counts: Int[Tensor, "*m bins"]) -> Float[Tensor, "*m bins"]:
    return counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)


@lru_cache(maxsize=4)
def _layout(size: int, parts: int, device: torch.device) -> tuple[list[tuple[int, int, int, int]], Tensor, Tensor, Tensor]:
    """Lay out the upper triangle of a matrix in horizontal strips, concatenated in memory.

    Each strip extends from its diagonal block to the right.

    Returns:
        Each strip (first row, last row, start, end), the indices of the diagonal, the mark of
        entries on or below it, and the index of column 0 for each row.
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
    """Return the flat indices of every pair of rows of a matrix, for each column.

    The matrix has shape (size, columns). A flat matrix is read much faster.
    """
    indices = torch.triu_indices(size, size, 1)[:, :, None] * columns + torch.arange(columns)
    first, second = indices.flatten(1)
    return first.to(device), second.to(device)


@lru_cache(maxsize=2)
def _scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Return a reused CPU buffer for the distances.

    Allocating a few megabytes costs as much as the arithmetic.
    """
    return torch.empty(size, dtype=dtype)
