"""Exact nearest neighbors of many points among many, in bounded memory and on any device.

Scores are inner products; larger is nearer. They are computed in float32 (or float64). TF32 and
autocast are disabled for the product, so that no setting of the host program changes a digit. Equal
scores go to the lower column. On processors with fast eight-bit products, a search of all points
among themselves first uses them to rule out points that provably are not neighbors. See `prefilter`.

Q queries, G gallery points, D dimensions, K neighbors, R rows and B columns of scores at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.geometry.barred import Barred
from unimetric.geometry.prefilter import PEAK, above, applies, nth, prefilter_neighbors

#: Minimum number of rows and columns of a block. With fewer rows, a matrix product is limited by
#: memory bandwidth; with fewer columns, by Python.
_ROWS, _COLUMNS = 128, 256
#: Number of rows that are returned at a time. Square blocks have half as many, to fit the cache of a processor.
_SIDE = 4096


def nearest(
    asking: Float[Tensor, "Q D"],
    answering: Float[Tensor, "G D"],
    k: int,
    *,
    own: Int[Tensor, "Q"] | None = None,
    barred: Barred | None = None,
    memory: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
    """Yield the k best columns of asking @ answering.T, some rows at a time.

    The product is computed in blocks of rows and columns with a running best, so that no (Q, G)
    matrix is created. A row with fewer than k columns to choose from ends in columns of -1, with a
    score of -inf.

    Args:
        asking: Query points.
        answering: Gallery points.
        k: Number of neighbors, at most G.
        own: Column of the row itself, which it must not find. -1 if there is none.
        barred: Further columns that a row must not find. For a search of all points among themselves,
            rows and columns have the same codes.
        memory: Bytes for the scores and everything computed from them. If None, `search_memory`.

    Returns:
        An iterator of (first row, scores, columns).
    """
    memory = search_memory(asking.device) if memory is None else memory
    if asking is answering and _is_mutual(asking, k, own, memory):
        prefiltered = prefilter_neighbors(asking, k, barred=barred, memory=memory) if applies(asking, k, memory) else None
        if prefiltered is None:
            yield from mutual(asking, k, barred=barred, side=min(_SIDE // 2, int((memory / 32) ** 0.5) // PEAK * PEAK))
        else:
            yield from _search_unproven(asking, k, prefiltered, memory, barred)
        return
    rows, columns = _chunk(len(asking), len(answering), k, asking.element_size(), memory)
    scores = asking.new_empty(rows * columns)
    for top in range(0, len(asking), rows):
        some = asking[top : top + rows]
        values, found_columns = some.new_empty(len(some), 0), torch.empty(len(some), 0, dtype=torch.int64, device=some.device)
        for left in range(0, len(answering), columns):
            others = answering[left : left + columns]
            score = scores[: len(some) * len(others)].view(len(some), len(others))
            with exactly(some.device):
                torch.mm(some, others.T, out=score)
            if own is not None:
                _forbid(score, own[top : top + rows] - left)
            if barred is not None:
                barred.fill(score, -torch.inf, top=top, left=left)
            found = best(score, min(k, len(others)))
            values, found_columns = found if left == 0 else merge_best((values, found_columns), found, left, k)
        yield top, values, found_columns.masked_fill_(values == -torch.inf, -1)


def search_memory(device: torch.device) -> int:
    """Return how many bytes a search uses by default.

    Half a GiB on a CPU. On a GPU, each block waits once for the device, so blocks should be larger: an
    eighth of the free memory, from half a GiB to four.
    """
    if device.type != "cuda":
        return 1 << 29
    return min(max(torch.cuda.mem_get_info(device)[0] // 8, 1 << 29), 1 << 32)


def _is_mutual(points: Float[Tensor, "N D"], k: int, own: Int[Tensor, "N"] | None, memory: int) -> bool:
    """Return whether computing each score once for both points saves time and fits memory."""
    if points.device.type != "cpu" or k > 64 or len(points) < 2 * _SIDE or 64 * k * len(points) > memory:
        return False
    return own is not None and torch.equal(own, torch.arange(len(points)))


def _search_unproven(
    points: Float[Tensor, "N D"],
    k: int,
    prefiltered: tuple[Float[Tensor, "N K"], Int[Tensor, "N K"], Bool[Tensor, "N"]],
    memory: int,
    barred: Barred | None,
) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
    """Yield the prefilter's neighbors, after searching the few unproven points in full."""
    values, columns, proven = prefiltered
    rows = (~proven).nonzero()[:, 0]
    if len(rows):
        others = None if barred is None else barred.take(rows)
        for top, value, column in nearest(points[rows], points, k, own=rows, barred=others, memory=memory):
            some = rows[top : top + len(value)]
            values[some], columns[some] = value, column
    for top in range(0, len(points), _SIDE):
        yield top, values[top : top + _SIDE], columns[top : top + _SIDE]


def mutual(
    points: Float[Tensor, "N D"], k: int, *, barred: Barred | None = None, side: int = _SIDE
) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
    """Yield the k nearest other points of every point, with half the products of `nearest`.

    A score serves both its row and its column. Blocks come in an order in which every point is
    compared with the others in ascending order, as the tie rule requires. Intended for few
    neighbors on a CPU, where products dominate the time.

    Args:
        points: All points.
        k: Number of neighbors, less than the number of points.
        barred: Points that must not find each other, with the same codes as rows and as columns.
        side: Number of rows and columns of scores at a time, a multiple of 16.

    Returns:
        An iterator of (first row, scores, columns).
    """
    count = len(points)
    # Padding points complete the last tile of rows. They are masked below and never found.
    points = torch.nn.functional.pad(points, (0, 0, 0, -count % PEAK))
    values, columns = points.new_empty(len(points), 0), torch.empty(len(points), 0, dtype=torch.int64)
    held = list(zip(values.split(side), columns.split(side), strict=True))
    scores = points.new_empty(side * side)
    for row, some in enumerate(points.split(side)):
        for column, others in enumerate(points[row * side :].split(side), row):
            score = scores[: len(some) * len(others)].view(len(some), len(others))
            with exactly(points.device):
                torch.mm(some, others.T, out=score)
            score[:, count - column * side :] = -torch.inf
            if row == column:
                score.fill_diagonal_(-torch.inf)
            if barred is not None:
                barred.fill(score, -torch.inf, top=row * side, left=column * side)
            mine, theirs = _find_better(score, held[row][0], held[column][0] if column > row else None, k)
            held[row] = merge_best(held[row], mine, column * side, k)
            if theirs is not None:
                held[column] = merge_best(held[column], theirs, row * side, k)
        value, index = (part[: count - row * side] for part in held[row])
        held[row] = (value[:0], index[:0])
        yield row * side, value, index.masked_fill_(value == -torch.inf, -1)


def merge_best(held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], left: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of the held and the new scores.

    Held scores have lower columns, so a stable sort places them before equal new ones.

    Args:
        held: Scores and columns so far.
        new: Scores and columns of a block.
        left: First column of the block.
        k: Number of scores per row.
    """
    values, order = torch.cat([held[0], new[0]], 1).sort(dim=1, descending=True, stable=True)
    return values[:, :k], torch.cat([held[1], new[1] + left], 1).gather(1, order[:, :k])


_Found = tuple[Float[Tensor, "R M"], Int[Tensor, "R M"]]


def _find_better(
    score: Float[Tensor, "R B"], held: Float[Tensor, "R K"], held_by_columns: Float[Tensor, "B K"] | None, k: int
) -> tuple[_Found, _Found | None]:
    """Return the scores of a block that exceed the worst held score of their row.

    If columns are queries too, also return those that exceed the worst held score of their column.
    """
    rows, columns = score.shape
    none = score.new_full((1,), torch.inf)
    rows_full = _is_full(held, k)
    columns_full = held_by_columns is not None and _is_full(held_by_columns, k)
    row_threshold = held[:, -1] if rows_full else none.expand(rows)
    column_threshold = none.expand(columns)
    if held_by_columns is not None and columns_full:
        column_threshold = held_by_columns[:, -1]
    by_row, by_column = above(score, row_threshold, column_threshold)
    mine = _to_rows(*by_row, rows, k) if rows_full else None
    theirs = None
    if held_by_columns is not None:
        theirs = _to_rows(*by_column, columns, k) if columns_full else None
        theirs = theirs or best(score.T.contiguous(), min(k, rows))
    return mine or best(score, min(k, columns)), theirs


def _is_full(held: Float[Tensor, "R K"], k: int) -> bool:
    """Return whether every row holds k scores.

    Barred columns leave -inf, which every score would exceed.
    """
    return held.shape[1] == k and bool(held[:, -1].amin() > -torch.inf)


def _to_rows(who: Int[Tensor, "P"], where: Int[Tensor, "P"], value: Float[Tensor, "P"], count: int, k: int) -> _Found | None:
    """Arrange the found scores in one row per query, padded with -inf.

    Returns None if a row has too many.
    """
    who, order = who.sort(stable=True)  # stable: the finds of a query keep their ascending columns
    rank = nth(who, count)
    width = int(rank.max()) + 1 if len(rank) else 0
    if width > max(4 * k, 64):
        return None
    values, columns = value.new_full((count, width), -torch.inf), torch.zeros(count, width, dtype=torch.int64)
    values[who, rank], columns[who, rank] = value[order], where[order]
    return values, columns


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Disable TF32, bfloat16 and autocast, whatever the surrounding program has set."""
    torch_backends: Any = torch.backends  # its type stubs lack the settings of oneDNN
    backends = (torch_backends.cuda.matmul, torch_backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _chunk(queries: int, answers: int, k: int, size: int, memory: int) -> tuple[int, int]:
    """Return how many rows and columns of scores fit the memory."""
    whole = _tile(answers, k) == 1
    column = 4 * (size + 8) if whole else 2 * size  # a sort needs room for its result, its indices and its workspace
    row = 24 * k * (size + 8)  # candidates, their columns, held and merged scores
    rows = memory // (column * answers + row)
    if rows >= min(_ROWS, queries):
        return min(rows, queries), answers
    rows = max(1, min(_ROWS, queries, memory // (2 * row)))
    return rows, min(answers, max(_COLUMNS, (memory // rows - row) // column))


def _forbid(score: Float[Tensor, "R B"], column: Int[Tensor, "R"]) -> None:
    """Write -inf into one column per row, if the row has that column.

    Does not read from the device which rows do.
    """
    inside = ((column >= 0) & (column < score.shape[1]))[:, None]
    column = column.clamp(0, score.shape[1] - 1)[:, None]
    score.scatter_(1, column, torch.where(inside, -torch.inf, score.gather(1, column)))


def _tile(columns: int, k: int) -> int:
    """Return how many columns share one maximum.

    It is 1 if computing maxima first would not save time.
    """
    tile = 16 if k <= 64 else 4
    return tile if columns >= 2 * tile * (k + 1) else 1


def best(score: Float[Tensor, "R B"], k: int) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """Return the k largest values of each row and their columns, in order, ties by column."""
    if _tile(score.shape[1], k) == 1:
        whole = score.sort(dim=1, descending=True, stable=True)
        return whole.values[:, :k], whole.indices[:, :k]
    # Select one more than requested: if it is smaller than the last, no tie was split.
    if score.is_cuda:  # to sort all rows is cheaper than to wait for which rows have ties
        values, columns = sort_by_value(*score.topk(k + 1, sorted=False))
    else:
        columns = _candidates(score, k + 1)
        values, order = score.gather(1, columns).topk(k + 1)
        columns = _order_ties(values, columns.gather(1, order))
    last, beyond = values[:, k - 1 : k], values[:, k : k + 1]
    values, columns = values[:, :k], columns[:, :k]
    split = ((last == beyond) & (last > -torch.inf)).nonzero()[:, 0]
    for some in split.split(max(1, score.numel() // (16 * score.shape[1]))):
        values[some], columns[some] = _settle(score[some], last[some], k)
    return values, columns


def sort_by_value(values: Float[Tensor, "R K"], columns: Int[Tensor, "R K"]) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """Return descending values with their columns, which ascend among equal values."""
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _order_ties(values: Float[Tensor, "R K"], columns: Int[Tensor, "R K"]) -> Int[Tensor, "R K"]:
    """Order the columns of descending values, so that they ascend among equal values."""
    tied = (values[:, 1:] == values[:, :-1]).any(1).nonzero()[:, 0]
    if len(tied):
        columns[tied] = sort_by_value(values[tied], columns[tied])[1]
    return columns


def _candidates(score: Float[Tensor, "R B"], k: int) -> Int[Tensor, "R K"]:
    """Return k columns per row that hold its k largest values, in any order.

    The k largest values are in the k tiles with the largest maxima, because each of those maxima is
    at least as large as the smallest of them. Each row is therefore read once, and only few columns
    remain to be searched. This halves the time of topk on a CPU; it does not help on a GPU.
    """
    tile = _tile(score.shape[1], k)
    if tile == 1:
        return score.topk(k, sorted=False).indices
    tiles = score.shape[1] // tile
    # Columns of a tile are `tiles` apart, so that their maximum is a maximum of long vectors.
    peaks = score[:, : tiles * tile].unflatten(1, (tile, tiles)).amax(1)
    chosen = _candidates(peaks, k)
    inside = (chosen[:, None, :] + torch.arange(0, tiles * tile, tiles, device=score.device)[:, None]).flatten(1)
    rest = torch.arange(tiles * tile, score.shape[1], device=score.device).expand(len(score), -1)
    columns = torch.cat([inside, rest], 1)
    return columns.gather(1, score.gather(1, columns).topk(k, sorted=False).indices)


def _settle(score: Float[Tensor, "R B"], last: Float[Tensor, "R 1"], k: int) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """Return the k best of rows with ties.

    These are all values above the last one, then its equals, lowest column first.
    """
    above, equal = score > last, score == last
    room = k - above.sum(1, keepdim=True)
    columns = (above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))).nonzero()[:, 1].view(len(score), k)
    order = score.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return order.values, columns.gather(1, order.indices)
