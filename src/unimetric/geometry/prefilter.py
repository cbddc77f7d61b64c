"""Exact prefilter for neighbors: score pairs in eight bits, and few of them in float32.

A point a is rounded to â, whose entries are integers from -127 to 127 times a scale. Products of
such points take a third of the time, and by Cauchy-Schwarz they bound the exact products:

    |<a, b> - <â, b̂>|  =  |<a - â, b> + <â, b - b̂>|  <=  |a - â| |b| + |â| |b - b̂|

Each point gets a threshold. All points that might score above it form its shortlist and are scored
in float32. If the k-th best of the shortlist exceeds the threshold, no better point was skipped. A
threshold may be any number: a bad one leaves a point unproven, but never gives a wrong result. A
sample of one point in sixteen yields thresholds with short shortlists for any distribution of
points.

N points, D dimensions, K neighbors, R rows and B columns of scores at a time, S sampled points, P
pairs.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int8, Real, UInt8
from torch import Tensor

from unimetric.geometry.barred import Barred

#: Rows that share one maximum, points per sampled point, and rows and columns of a block of scores.
PEAK, _SAMPLE, _SIDE = 16, 16, 4096
#: A find is one integer: query, the highest code minus its code, gallery point, from these bits on. In sorted order, the
#: finds of a query are contiguous, highest code first.
_ROW, _CODE = 40, 32


def _fastest_engine() -> str:
    """Return the library for eight-bit products.

    Their sums must not saturate. If there is none, return "", and the same codes are computed in float64. The
    threads of XNNPACK, which `qnnpack` calls, wait actively: on x86 they slow down everything between two
    products.
    """
    if platform.machine() in ("x86_64", "AMD64") and torch.cpu._is_vnni_supported():
        return "onednn"
    return "qnnpack" if "qnnpack" in torch.backends.quantized.supported_engines else ""


_ENGINE = _fastest_engine()


def applies(points: Float[Tensor, "N D"], k: int, memory: int) -> bool:
    """Return whether the prefilter is likely to save time and fits the memory.

    It was timed on ARM and on x86 with VNNI. Other processors have slower eight-bit products.

    Args:
        points: All points.
        k: Number of neighbors.
        memory: Bytes available to the search.
    """
    fast = len(points) >= 4 * _SIDE and (platform.machine() in ("aarch64", "arm64") or torch.cpu._is_vnni_supported())
    kind = points.device.type == "cpu" and points.dtype == torch.float32 and 64 <= points.shape[1] <= 4096
    return fast and kind and k <= 32 and _count_bytes(points, k) <= memory and multiplies()


def multiplies() -> bool:
    """Return whether the library multiplies signed integers.

    QNNPACK does so in some versions of PyTorch only.
    """
    try:
        with _engine():
            block = _Block.of(torch.eye(64, dtype=torch.float32, device="cpu"), 0.0)
            block.codes(block, 1 / 16)
    except (RuntimeError, AttributeError):
        return False
    return bool(_ENGINE)


def _count_bytes(points: Float[Tensor, "N D"], k: int, side: int = _SIDE) -> int:
    """Return the bytes of a search with one worker."""
    return len(points) * (32 * _shortlist(k) + 4 * points.shape[1]) + 4 * side**2


def prefilter_neighbors(
    points: Float[Tensor, "N D"], k: int, *, barred: Barred | None = None, memory: int = 1 << 29, side: int = _SIDE
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"], Bool[Tensor, "N"]] | None:
    """Find the k nearest other points of every point. Ties go to the lower index.

    Args:
        points: All points, float32 on a CPU.
        k: Number of neighbors.
        barred: Points that must not find each other, with the same codes as rows and as columns.
        memory: Bytes available to the search.
        side: Number of rows and columns of a block of scores.

    Returns:
        Scores, indices, and which points are proven. None if the prefilter would exclude too
        little: the bound is wide compared with the differences between scores. Causes are a few
        entries far larger than all others, or very many points close together.
    """
    points = points.detach()
    largest = points.abs().amax(1)
    spare = max(0, memory - _count_bytes(points, k, side))
    with _engine(), torch.autocast("cpu", enabled=False), _workers(1 + spare // (2 * side**2)) as pool:
        # A block shares one scale, so its points should have similar largest entries.
        plan = _plan(points, list(largest.argsort().split(side)), float(largest.max()), k, pool)
        return None if plan is None else _search(points, plan, k, barred, pool)


_Codes = Int8[Tensor, "*shape"] | UInt8[Tensor, "*shape"]


def code_range() -> tuple[torch.dtype, int, int]:
    """Return the type of the codes, the lowest and the highest. Those of oneDNN have no sign."""
    kind = torch.uint8 if _ENGINE == "onednn" else torch.int8
    return kind, torch.iinfo(kind).min, torch.iinfo(kind).max


@dataclass(frozen=True)
class _Block:
    """Points in eight bits that share one scale.

    Args:
        rounded: (R, D) integers from -127 to 127.
        scale: Length of one step of an integer.
        error: Rounding error |a - â| of each point.
        length: Norm |a| of each point.
        rounded_length: Norm |â| of each rounded point.
    """

    rounded: Int8[Tensor, "R D"]
    scale: float
    error: Float[Tensor, "R"]
    length: Float[Tensor, "R"]
    rounded_length: Float[Tensor, "R"]

    @classmethod
    def of(cls, points: Float[Tensor, "R D"], least: float) -> _Block:
        """Round the points at the scale of their largest entry, or of `least` if that is larger.

        The scales of the kernels have a limited range.
        """
        scale = max(float(points.abs().max()), least) / 127
        whole = (points / scale).round_()
        rounded = whole.to(torch.int8)
        plain = whole.mul_(scale)
        return cls(rounded, scale, (points - plain).norm(dim=1), points.norm(dim=1), plain.norm(dim=1))

    @cached_property
    def _left(self) -> Tensor:
        """The integers as the left factor: oneDNN requires them without sign, plus 128."""
        if _ENGINE == "onednn":
            return (self.rounded ^ -128).view(torch.uint8)
        return torch._make_per_tensor_quantized_tensor(self.rounded, self.scale, 0)

    @cached_property
    def _right(self) -> Any:
        """The integers as the right factor, in the order of the library."""
        if _ENGINE == "onednn":
            return torch.ops.onednn.qlinear_prepack(self.rounded, None)
        return torch.ops.quantized.linear_prepack(self._left, None)

    def codes(self, other: _Block, step: float) -> _Codes:
        """Return rounded scores with another block, in integer steps.

        The lowest code is zero and everything below; the highest is everything too high for eight bits. A block
        requires the same step each time, because QNNPACK stores the first one with the right factor.
        """
        if _ENGINE == "onednn":
            product: Any = torch.ops.onednn.qlinear_pointwise
            scale, zero = self.length.new_tensor([other.scale]), self.rounded.new_zeros(1, dtype=torch.int64)
            return product(self._left, self.scale, 128, other._right, scale, zero, None, step, 0, torch.uint8, "none", [], "")
        if _ENGINE == "qnnpack":
            score = torch.ops.quantized.linear(self._left, other._right, step, -128)
            return torch.empty(0, dtype=torch.int8).set_(score.untyped_storage(), 0, score.shape, score.stride())  # int_repr() copies
        # Sums of integers below 2**53 are exact in float64.
        steps = self.rounded.double() @ other.rounded.double().T * (self.scale * other.scale / step)
        return (steps.round().clamp(0, 255) - 128).to(torch.int8)

    def error_bound(self, other: _Block, step: float) -> Float[Tensor, "R"]:
        """Return how far the score of a row with any point of another block may be above its code.

        The sum of the rounding bound (increased by a thousandth, because these norms are rounded
        too), the float32 error of a score, and one step of a code.
        """
        bound = 1.001 * (self.error * other.length.max() + self.rounded_length * other.error.max())
        return bound + 2e-7 * self.rounded.shape[1] * self.length * other.length.max() + step


@dataclass(frozen=True)
class _Plan:
    """Parameters of a search.

    Args:
        step: Score difference between two codes.
        order: Point indices of each block.
        blocks: Points of each block in eight bits.
        error_bounds: (R, blocks) per block: how far a score with another block may be above its
            code.
        thresholds: (R,) per block: score that no point outside the shortlist exceeds.
    """

    step: float
    order: list[Int[Tensor, "R"]]
    blocks: list[_Block]
    error_bounds: list[Float[Tensor, "R blocks"]]
    thresholds: list[Float[Tensor, "R"]]

    def code_threshold(self, row: int, column: int) -> _Codes:
        """Return the code above which a score may exceed the threshold of its row.

        The highest code always may.
        """
        kind, lowest, highest = code_range()
        code = (self.thresholds[row] - self.error_bounds[row][:, column]) / self.step + lowest
        return code.floor().clamp(lowest, highest - 1).to(kind)


def _shortlist(k: int) -> int:
    """Return the target length of a shortlist.

    It covers the points within the bound of the k-th best, with a reserve for the sampling error.
    """
    return 4 * k + 48


def _plan(points: Float[Tensor, "N D"], order: list[Int[Tensor, "R"]], largest: float, k: int, pool: Executor) -> _Plan | None:
    """Choose thresholds that about as many points exceed as a shortlist should have.

    Return None if too few points would be proven.
    """
    if not 1e-12 < largest < 1e12:  # also excludes NaN
        return None
    generator = torch.Generator().manual_seed(0)  # the sample is random because points may be sorted
    sample = points[torch.randperm(len(points), generator=generator)[: len(points) // _SAMPLE // PEAK * PEAK]]
    rank = math.ceil(_shortlist(k) / _SAMPLE)
    if len(sample) < 2 * PEAK * rank:
        return None
    some = sample.double()  # no setting of the host program reduces the precision of float64
    highest = float((some[:512] @ some.T).topk(rank + 1).values[:, rank].max())  # the first is the point's product with itself
    if highest < 1e-3 * largest**2:
        return None
    step, least = 1.1 * highest / 255, largest / 64
    known = _Block.of(sample, least)

    def estimate(rows: Int[Tensor, "R"]) -> tuple[Float[Tensor, "R"], int]:
        block = _Block.of(points[rows], least)
        best = block.codes(known, step).unflatten(1, (PEAK, -1)).amax(1).topk(rank).values.float()
        likely = step * (best[:, math.ceil(k / _SAMPLE) - 1] - best[:, -1]) > block.error_bound(block, step)
        return best[:, -1], int(likely.sum())

    codes, likely = zip(*pool.map(estimate, order), strict=True)
    if sum(likely) < 2 / 3 * len(points):
        return None
    # The rows of a tile share their lowest threshold, so they should have similar thresholds.
    order = [rows[code.argsort()] for rows, code in zip(order, codes, strict=True)]
    blocks = [_Block.of(points[rows], least) for rows in order]
    error_bounds = [torch.stack([block.error_bound(other, step) for other in blocks], 1) for block in blocks]
    thresholds = [
        # The lowest code never exceeds a code threshold, and its score may be as high as its error
        # bound. No threshold may be lower than that.
        torch.maximum(step * (code.sort().values - code_range()[1]) + bound.mean(1), bound.amax(1))
        for code, bound in zip(codes, error_bounds, strict=True)
    ]
    return _Plan(step, order, blocks, error_bounds, thresholds)


def _search(
    points: Float[Tensor, "N D"], plan: _Plan, k: int, barred: Barred | None, pool: Executor
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"], Bool[Tensor, "N"]] | None:
    """Fill the shortlists block by block, and score those of each finished block row."""
    count, order = len(points), plan.order
    values, indices = points.new_empty(count, k), torch.empty(count, k, dtype=torch.int64)
    proven, member = torch.empty(count, dtype=torch.bool), torch.empty(count, dtype=torch.int64)
    for number, some in enumerate(order):
        member[some] = number
    finds: list[list[Tensor]] = [[] for _ in order]
    room = 2 * count * _shortlist(k)

    def compare(row: int) -> list[Future[tuple[Tensor, Tensor]]]:
        return [pool.submit(_compare, plan, row, column, barred) for column in range(row, len(order))]

    ahead, scored = compare(0), []
    for row in range(len(order)):
        tasks, ahead = ahead, compare(row + 1)  # no worker waits for the end of a row
        for column, task in enumerate(tasks, row):
            for who, found in zip((row, column), task.result(), strict=True):
                finds[who].append(found)
                room -= len(found)
            if room < 0:  # many points too close together for eight bits
                return None
        scored.append(pool.submit(_score_shortlists, points, plan, row, torch.cat(finds[row]), member, k))
        finds[row] = []
    for some, threshold, task in zip(order, plan.thresholds, scored, strict=True):
        values[some], indices[some] = task.result()
        proven[some] = values[some, -1] > threshold
    return (values, indices, proven) if 2 * int(proven.sum()) >= count else None


def _compare(plan: _Plan, row: int, column: int, barred: Barred | None) -> tuple[Int[Tensor, "P"], Int[Tensor, "Q"]]:
    """Return the finds of one block among the points of another, and the reverse."""
    _, lowest, highest = code_range()
    codes = plan.blocks[row].codes(plan.blocks[column], plan.step)
    row_threshold, column_threshold = plan.code_threshold(row, column), plan.code_threshold(column, row)
    if row == column:
        codes.fill_diagonal_(lowest)
        column_threshold.fill_(highest)  # a diagonal block has the same points as rows and columns
    if barred is not None:  # the lowest code never exceeds a code threshold
        barred.take(plan.order[row], plan.order[column]).fill(codes, lowest)
    if spare := -len(codes) % PEAK:  # padding rows, whose threshold no code exceeds
        codes = torch.nn.functional.pad(codes, (0, 0, 0, spare), value=lowest)
        row_threshold = torch.nn.functional.pad(row_threshold, (0, spare), value=highest)
    by_row, by_column = above(codes, row_threshold, column_threshold)
    return _encode_finds(*by_row, plan.order[column]), _encode_finds(*by_column, plan.order[row])


_Above = tuple[Int[Tensor, "P"], Int[Tensor, "P"], Real[Tensor, "P"]]


def above(scores: Real[Tensor, "R B"], row_threshold: Real[Tensor, "R"], column_threshold: Real[Tensor, "B"]) -> tuple[_Above, _Above]:
    """Find the scores above the threshold of their row, and those above their column's.

    Few scores are. One pass over the block therefore computes the maxima of sixteen rows each, which
    serve both sides, and only tiles with a high maximum are inspected.

    Args:
        scores: Block of scores, with a multiple of 16 rows.
        row_threshold: Threshold of each row.
        column_threshold: Threshold of each column.

    Returns:
        (rows, columns, scores) by row threshold, and (columns, rows, scores) by column threshold.
    """
    tall, row_tiles = scores.view(-1, PEAK, scores.shape[1]), row_threshold.reshape(-1, PEAK)
    hot_tiles = _positions(tall.amax(1) > torch.minimum(row_tiles.amin(1)[:, None], column_threshold))
    tile, column = _divide(hot_tiles, scores.shape[1])
    score = tall[tile, :, column]  # (tiles, 16)

    def select(high: Bool[Tensor, "tiles 16"]) -> _Above:
        found = _positions(high)
        hot, inside = _divide(found, PEAK)
        return tile.index_select(0, hot) * PEAK + inside, column.index_select(0, hot), score.flatten().index_select(0, found)

    # `index_select` copies whole rows; indexing would take several times as long.
    by_row = select(score > row_tiles.index_select(0, tile))
    by_column = select(score > column_threshold.index_select(0, column)[:, None])
    return by_row, (by_column[1], by_column[0], by_column[2])


def _positions(mask: Bool[Tensor, "*shape"]) -> Int[Tensor, "P"]:
    """Return where a flattened mask is true. NumPy takes half the time of `nonzero`."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _divide(numbers: Int[Tensor, "P"], by: int) -> tuple[Int[Tensor, "P"], Int[Tensor, "P"]]:
    """Return quotients and remainders.

    NumPy divides with vector instructions, PyTorch number by number.
    """
    quotients = torch.from_numpy(numbers.numpy() // by)
    return quotients, numbers - quotients * by


def _encode_finds(asking: Int[Tensor, "P"], answering: Int[Tensor, "P"], code: _Codes, indices: Int[Tensor, "B"]) -> Int[Tensor, "P"]:
    """Encode each find as one integer, with the gallery point as its index among all points."""
    return (asking << _ROW) + ((torch.iinfo(code.dtype).max - code.long()) << _CODE) + indices.index_select(0, answering)


def _score_shortlists(
    points: Float[Tensor, "N D"], plan: _Plan, row: int, finds: Int[Tensor, "P"], member: Int[Tensor, "N"], k: int
) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """Return the k best of each shortlist in float32.

    A shortlist of fewer than k or very many points is skipped; its row ends in -inf.
    """
    asking = plan.order[row]
    finds = torch.from_numpy(np.sort(finds.numpy()))  # with vector instructions
    who = finds >> _ROW
    size = torch.bincount(who, minlength=len(asking))
    fit = (size >= k) & (size <= 4 * _shortlist(k))
    finds = finds.index_select(0, _positions(fit.index_select(0, who)))
    who, below, index = finds >> _ROW, finds >> _CODE & 255, finds & (1 << _CODE) - 1

    def score_of(some: Int[Tensor, "P"]) -> Float[Tensor, "P"]:
        return _scores(points, asking.index_select(0, who.index_select(0, some)), index.index_select(0, some))

    # Score the k highest codes first. Few of the others can reach the lowest of their scores.
    begin = size[fit].cumsum(0) - size[fit]
    first = (begin[:, None] + torch.arange(k)).flatten()
    score = score_of(first)
    lowest = points.new_zeros(len(asking))
    lowest[fit] = score.view(-1, k).amin(1)
    error_bound = plan.error_bounds[row].flatten().index_select(0, who * len(plan.blocks) + member.index_select(0, index))
    further = (plan.step * (255 - below) + error_bound >= lowest.index_select(0, who)) | (below == 0)
    further[first] = False
    others = _positions(further)
    score, scored = torch.cat([score, score_of(others)]), torch.cat([first, others])
    # Order by index, then sort stably, so that ties go to the lower index.
    who, index = who.index_select(0, scored), index.index_select(0, scored)
    order = ((who << _CODE) + index).argsort()
    who, score, index = (each.index_select(0, order) for each in (who, score, index))
    rank = nth(who, len(asking))
    width = max(k, int(rank.max()) + 1) if len(rank) else k
    values, indices = points.new_full((len(asking), width), -torch.inf), torch.full((len(asking), width), -1)
    values[who, rank], indices[who, rank] = score, index
    values, best = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices.gather(1, best[:, :k])


def nth(who: Int[Tensor, "P"], count: int) -> Int[Tensor, "P"]:
    """Count, for each entry of a sorted list of rows, the earlier entries of the same row.

    Args:
        who: Sorted row indices.
        count: Number of rows.
    """
    size = torch.bincount(who, minlength=count)
    return torch.arange(len(who)) - (size.cumsum(0) - size).index_select(0, who)


def _scores(points: Float[Tensor, "N D"], asking: Int[Tensor, "P"], answering: Int[Tensor, "P"]) -> Float[Tensor, "P"]:
    """Return the scores of pairs in float32, all summed in the same way.

    Equal points therefore have equal scores.
    """
    some = (1 << 16) // points.shape[1]  # both factors fit the cache of a core
    pairs = zip(asking.split(some), answering.split(some), strict=True)
    return torch.cat([points.index_select(0, one).mul_(points.index_select(0, other)).sum(1) for one, other in pairs])


@contextmanager
def _engine() -> Iterator[None]:
    """Select QNNPACK if it is the library, and restore the choice."""
    before = torch.backends.quantized.engine
    if _ENGINE == "qnnpack":
        torch.backends.quantized.engine = _ENGINE
    try:
        yield
    finally:
        if _ENGINE == "qnnpack":
            torch.backends.quantized.engine = before


@contextmanager
def _workers(most: int) -> Iterator[Executor]:
    """Divide the threads of PyTorch among workers, and restore their number afterwards.

    Many steps between two products run in one thread. A block per thread therefore takes 0.8 of the time of one block
    at a time. XNNPACK computes one product at a time.

    Args:
        most: Number of workers that fit the memory.
    """
    threads = torch.get_num_threads()
    workers = min(threads, most) if _ENGINE == "onednn" else 1
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers changed the setting of the whole process
