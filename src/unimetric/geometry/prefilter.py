"""A sieve for neighbours: all scores in eight bits first, in float32 only those that eight bits cannot rule out. Exact, and proven to be.

A point a is rounded to â, whose entries are whole numbers of -127 to 127 times a scale. Products of such points take a third of the time,
and by Cauchy and Schwarz they bound the true ones:

    |<a, b> - <â, b̂>|  =  |<a - â, b> + <â, b - b̂>|  <=  |a - â| |b| + |â| |b - b̂|

Each point is given a ceiling. Whatever might score above it goes onto the point's shortlist and is scored in float32; if the k-th best of
the shortlist lies above the ceiling, no better one was left out. A ceiling may be any number: a bad one leaves a point unproven, never
wrong. A look at one point in sixteen finds ceilings that leave short lists, whatever the points are distributed like.

N points, D dimensions, K neighbours, R rows and B columns of scores at a time, S points of the sample, P pairs.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8, Real
from torch import Tensor

#: How many rows share a peak, how many points stand for one of the sample, and how many rows and columns a block of scores has.
PEAK, _SAMPLE, _SIDE = 16, 16, 4096
#: A find is one whole number: who asks, 127 less the code, who answers. Sorted, each has its finds together, the highest code first.
_ROW, _CODE = 1 << 40, 1 << 32


def applies(points: Float[Tensor, "N D"], k: int, memory: int) -> bool:
    """Whether a sieve is likely to save time, and fits: it was measured on ARM, where PyTorch has fast products of eight bits.

    Args:
        points: all of them.
        k: how many neighbours.
        memory: bytes that the search may take.
    """
    able = platform.machine() in ("aarch64", "arm64") and "qnnpack" in torch.backends.quantized.supported_engines
    kind = points.device.type == "cpu" and points.dtype == torch.float32 and 64 <= points.shape[1] <= 4096
    bytes_ = len(points) * (32 * _shortlist(k) + 4 * points.shape[1]) + 4 * _SIDE**2
    return able and kind and k <= 32 and len(points) >= 4 * _SIDE and bytes_ <= memory


def prefilter_neighbors(
    points: Float[Tensor, "N D"], k: int, *, side: int = _SIDE
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"], Bool[Tensor, "N"]] | None:
    """The k nearest of all others for every point: scores, places, and which points this is proven for. Equal scores go by place.

    None where a sieve would hold too little back: where the bound is wide beside the differences between scores, since some entries are
    far larger than all others, say, or very many points lie close together.

    Args:
        points: all of them, float32 on a CPU.
        k: how many neighbours.
        side: how many rows and columns of scores at a time.
    """
    points = points.detach()
    largest = points.abs().amax(1)
    with _engine("qnnpack"), torch.autocast("cpu", enabled=False):
        # A block shares one scale, so its points should have largest entries alike.
        plan = _plan(points, list(largest.argsort().split(side)), float(largest.max()), k)
        return None if plan is None else _search(points, plan, k)


@dataclass(frozen=True)
class _Block:
    """Some points in eight bits, at a scale of their own.

    Args:
        rounded: (R, D) the points in eight bits.
        error: |a - â| of each.
        length: |a| of each.
        rounded_length: |â| of each.
    """

    rounded: Tensor
    error: Float[Tensor, "R"]
    length: Float[Tensor, "R"]
    rounded_length: Float[Tensor, "R"]

    @classmethod
    def of(cls, points: Float[Tensor, "R D"], least: float) -> _Block:
        """Round them, at the scale of their largest entry, or of `least` where that is more: the kernels' scales have a range."""
        rounded = torch.quantize_per_tensor(points, max(float(points.abs().max()), least) / 127, 0, torch.qint8)
        plain = rounded.dequantize()
        return cls(rounded, (points - plain).norm(dim=1), points.norm(dim=1), plain.norm(dim=1))

    @cached_property
    def _packed(self) -> Any:
        return torch.ops.quantized.linear_prepack(self.rounded, None)

    def codes(self, other: _Block, step: float) -> Int8[Tensor, "R B"]:
        """Rounded scores with another block in whole steps: -128 is zero and all below, 127 is all that is too high for eight bits.

        A block is to be given the same step each time: what it is packed into remembers the first.
        """
        score = torch.ops.quantized.linear(self.rounded, other._packed, step, -128)
        return torch.empty(0, dtype=torch.int8).set_(score.untyped_storage(), 0, score.shape, score.stride())  # int_repr() would copy

    def error_bound(self, other: _Block, step: float) -> Float[Tensor, "R"]:
        """How far a row's score with any point of another block may lie above its code.

        That is the bound, a thousandth more since these norms are rounded too, what float32 may add to a score, and the step of a code.
        """
        bound = 1.001 * (self.error * other.length.max() + self.rounded_length * other.error.max())
        return bound + 2e-7 * self.rounded.shape[1] * self.length * other.length.max() + step


@dataclass(frozen=True)
class _Plan:
    """How to search.

    Args:
        step: of the codes.
        order: of each block, which points it holds.
        blocks: these points in eight bits.
        doubts: of each block, (R, blocks) how far a score with another block may lie above its code.
        ceilings: of each block, (R,) the score that whatever is not on the shortlist stays at or below.
    """

    step: float
    order: list[Int[Tensor, "R"]]
    blocks: list[_Block]
    doubts: list[Float[Tensor, "R blocks"]]
    ceilings: list[Float[Tensor, "R"]]

    def bar(self, row: int, column: int) -> Int8[Tensor, "R"]:
        """The code above which a score of one block with another might lie above the ceiling of its row; 127 always might."""
        code = (self.ceilings[row] - self.doubts[row][:, column]) / self.step - 128
        return code.floor().clamp(-128, 126).to(torch.int8)


def _shortlist(k: int) -> int:
    """How long a shortlist should be: what is within the bound of the k-th best, and then some, since a sample is but a sample."""
    return 4 * k + 48


def _plan(points: Float[Tensor, "N D"], order: list[Int[Tensor, "R"]], largest: float, k: int) -> _Plan | None:
    """Ceilings that about as many points might lie above as a shortlist should have; None if that would seldom be enough for a proof."""
    if not 1e-12 < largest < 1e12:  # nor is it NaN
        return None
    dice = torch.Generator().manual_seed(0)  # a random sample, since points may well come in an order
    sample = points[torch.randperm(len(points), generator=dice)[: len(points) // _SAMPLE // PEAK * PEAK]]
    rank = math.ceil(_shortlist(k) / _SAMPLE)
    if len(sample) < 2 * PEAK * rank:
        return None
    some = sample.double()  # which no setting of the host program makes less of
    highest = float((some[:512] @ some.T).topk(rank + 1).values[:, rank].max())  # the first of them is of a point with itself
    if highest < 1e-3 * largest**2:
        return None
    step, least = 1.1 * highest / 255, largest / 64
    known, codes, likely = _Block.of(sample, least), [], 0
    for rows in order:
        block = _Block.of(points[rows], least)
        best = block.codes(known, step).unflatten(1, (PEAK, -1)).amax(1).topk(rank).values.float()
        codes.append(best[:, -1])
        likely += int((step * (best[:, math.ceil(k / _SAMPLE) - 1] - best[:, -1]) > block.error_bound(block, step)).sum())
    if likely < 2 / 3 * len(points):
        return None
    # The rows of a peak share their lowest bar, so they should have bars alike.
    order = [rows[code.argsort()] for rows, code in zip(order, codes, strict=True)]
    blocks = [_Block.of(points[rows], least) for rows in order]
    doubts = [torch.stack([block.error_bound(other, step) for other in blocks], 1) for block in blocks]
    ceilings = [
        # A code of -128 is never above a bar, and may be as high as the doubt of it: so no ceiling is lower than that.
        torch.maximum(step * (code.sort().values + 128) + doubt.mean(1), doubt.amax(1))
        for code, doubt in zip(codes, doubts, strict=True)
    ]
    return _Plan(step, order, blocks, doubts, ceilings)


def _search(points: Float[Tensor, "N D"], plan: _Plan, k: int) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"], Bool[Tensor, "N"]] | None:
    """Fill the shortlists, a block at a time for its rows and its columns, and settle those of each row of blocks when it is through."""
    count, blocks, order = len(points), plan.blocks, plan.order
    values, places = points.new_empty(count, k), torch.empty(count, k, dtype=torch.int64)
    proven, member = torch.empty(count, dtype=torch.bool), torch.empty(count, dtype=torch.int64)
    for number, some in enumerate(order):
        member[some] = number
    finds: list[list[Tensor]] = [[] for _ in blocks]
    room = 2 * count * _shortlist(k)
    for row, block in enumerate(blocks):
        for column in range(row, len(blocks)):
            codes = block.codes(blocks[column], plan.step)
            row_bar, column_bar = plan.bar(row, column), plan.bar(column, row)
            if row == column:
                codes.fill_diagonal_(-128)
                column_bar.fill_(127)  # its columns are its rows
            if spare := -len(codes) % PEAK:  # rows that nothing lies above the bar of
                codes = torch.nn.functional.pad(codes, (0, 0, 0, spare), value=-128)
                row_bar = torch.nn.functional.pad(row_bar, (0, spare), value=127)
            for who, where, found in zip((row, column), (column, row), above(codes, row_bar, column_bar), strict=True):
                finds[who].append(_find(*found, order[where]))
                room -= len(finds[who][-1])
            if room < 0:  # crowds of points, too near to one another for eight bits
                return None
        some = order[row]
        values[some], places[some] = _settle(points, plan, row, torch.cat(finds[row]), member, k)
        proven[some] = values[some, -1] > plan.ceilings[row]
        finds[row] = []
    return (values, places, proven) if 2 * int(proven.sum()) >= count else None


_Above = tuple[Int[Tensor, "P"], Int[Tensor, "P"], Real[Tensor, "P"]]


def above(scores: Real[Tensor, "R B"], row_bar: Real[Tensor, "R"], column_bar: Real[Tensor, "B"]) -> tuple[_Above, _Above]:
    """The rows, columns and scores of what lies above the bar of its row; the columns, rows and scores of what does so of its column.

    Only few do. So the peaks of sixteen rows each, which one pass over the block finds for both sides, are looked at first.

    Args:
        scores: a block of them, its rows a multiple of 16.
        row_bar: of each row.
        column_bar: of each column.
    """
    tall, row_bars = scores.view(-1, PEAK, scores.shape[1]), row_bar.reshape(-1, PEAK)
    tile, column = (tall.amax(1) > torch.minimum(row_bars.amin(1)[:, None], column_bar)).nonzero().unbind(1)
    score = tall[tile, :, column]  # (tiles, 16)

    def chosen(high: Bool[Tensor, "tiles 16"]) -> _Above:
        hot, inside = high.nonzero().unbind(1)
        return tile[hot] * PEAK + inside, column[hot], score[hot, inside]

    by_row, by_column = chosen(score > row_bars[tile]), chosen(score > column_bar[column][:, None])
    return by_row, (by_column[1], by_column[0], by_column[2])


def _find(asking: Int[Tensor, "P"], answering: Int[Tensor, "P"], code: Int8[Tensor, "P"], places: Int[Tensor, "B"]) -> Int[Tensor, "P"]:
    """Finds in one whole number each, those who answer by their place among all points."""
    return asking * _ROW + (127 - code.long()) * _CODE + places[answering]


def _settle(
    points: Float[Tensor, "N D"], plan: _Plan, row: int, finds: Int[Tensor, "P"], member: Int[Tensor, "N"], k: int
) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """The k best of each shortlist in float32. A list of less than k, or of very many, is not looked at: it ends in -inf."""
    asking = plan.order[row]
    finds = finds.sort().values
    size = torch.bincount(finds // _ROW, minlength=len(asking))
    fit = (size >= k) & (size <= 4 * _shortlist(k))
    finds = finds[fit[finds // _ROW]]
    who, code, place = finds // _ROW, 127 - finds % _ROW // _CODE, finds % _CODE
    # The k highest codes are scored first. The least of their scores is a bar that few of the others might reach.
    first = nth(who, len(asking)) < k
    score = points.new_empty(len(who))
    score[first] = _scores(points, asking[who[first]], place[first])
    bar = points.new_zeros(len(asking))
    bar[fit] = score[first].view(-1, k).amin(1)
    reach = plan.step * (code + 128) + plan.doubts[row][who, member[place]]
    further = ~first & ((reach >= bar[who]) | (code == 127))
    score[further] = _scores(points, asking[who[further]], place[further])
    # By place, as ties ask for; then a stable sort.
    kept = (first | further).nonzero()[:, 0]
    kept = kept[(who[kept] * _CODE + place[kept]).argsort()]
    who, score, place = who[kept], score[kept], place[kept]
    rank = nth(who, len(asking))
    width = max(k, int(rank.max()) + 1 if len(rank) else 0)
    values, places = points.new_full((len(asking), width), -torch.inf), torch.full((len(asking), width), -1)
    values[who, rank], places[who, rank] = score, place
    values, best = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], places.gather(1, best[:, :k])


def nth(who: Int[Tensor, "P"], count: int) -> Int[Tensor, "P"]:
    """Of a sorted list of rows: how many of the same row stand before.

    Args:
        who: the rows.
        count: how many rows there are.
    """
    size = torch.bincount(who, minlength=count)
    return torch.arange(len(who)) - (size.cumsum(0) - size)[who]


def _scores(points: Float[Tensor, "N D"], asking: Int[Tensor, "P"], answering: Int[Tensor, "P"]) -> Float[Tensor, "P"]:
    """The scores of pairs in float32, each summed in the same way, so that equal points have equal scores."""
    some = (1 << 20) // points.shape[1]
    return torch.cat([points[one].mul_(points[other]).sum(1) for one, other in zip(asking.split(some), answering.split(some), strict=True)])


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """Products of eight bits by this library, and by the one before afterwards."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
