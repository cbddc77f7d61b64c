"""The nearest neighbours of many points among many: exact, in bounded memory, on any device.

Scores are inner products, larger is nearer. They are made in float32 (or float64) and in nothing less: TF32 and autocast are switched
off for the product, so that no setting of the host program changes a digit. Equal scores go to the lower column. Where everyone asks
everyone on an ARM processor, eight bits rule out first what provably is no neighbour; see `sieve`.

Q points that ask, G that answer, D dimensions, K neighbours, R rows and B columns of scores at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.geometry.prefilter import PEAK, above, applies, nth, prefilter_neighbors

#: Fewer rows at a time than this leave a matrix product waiting for memory; fewer columns, for Python.
_ROWS, _COLUMNS = 128, 256
#: How many rows the largest square block has: it should fit a processor's cache.
_SIDE = 4096


def nearest(
    asking: Float[Tensor, "Q D"], answering: Float[Tensor, "G D"], k: int, *, own: Int[Tensor, "Q"] | None = None, memory: int = 1 << 29
) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
    """The k best columns of asking @ answering.T, some rows at a time: where the rows start, their scores and their columns.

    Chunked over rows and over columns with a running best, so that no (Q, G) matrix is ever made. A row that has fewer than k columns
    to choose from ends in columns of -1, with a score of -inf.

    Args:
        asking: the points that ask.
        answering: the points that answer.
        k: how many, at most G.
        own: the column that a row must not find, since it is the row itself; -1 for none.
        memory: bytes for the scores and everything made of them.
    """
    worth = asking is answering and asking.device.type == "cpu" and k <= 64 and len(asking) >= 2 * _SIDE and 64 * k * len(asking) <= memory
    if worth and own is not None and torch.equal(own, torch.arange(len(asking))):
        sifted = prefilter_neighbors(asking, k) if applies(asking, k, memory) else None
        if sifted is None:
            yield from mutual(asking, k, side=min(_SIDE, int((memory / 32) ** 0.5) // PEAK * PEAK))
        else:
            yield from _complete(asking, k, sifted, memory)
        return
    rows, columns = _chunk(len(asking), len(answering), k, asking.element_size(), memory)
    scores = asking.new_empty(rows * columns)
    for top in range(0, len(asking), rows):
        some = asking[top : top + rows]
        values, places = some.new_empty(len(some), 0), torch.empty(len(some), 0, dtype=torch.int64, device=some.device)
        for left in range(0, len(answering), columns):
            others = answering[left : left + columns]
            score = scores[: len(some) * len(others)].view(len(some), len(others))
            with exactly(some.device):
                torch.mm(some, others.T, out=score)
            if own is not None:
                _forbid(score, own[top : top + rows] - left)
            found = best(score, min(k, len(others)))
            values, places = found if left == 0 else _merge((values, places), found, left, k)
        yield top, values, places.masked_fill_(values == -torch.inf, -1)


def _complete(
    points: Float[Tensor, "N D"], k: int, sifted: tuple[Float[Tensor, "N K"], Int[Tensor, "N K"], Bool[Tensor, "N"]], memory: int
) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
    """What a sieve has found, with the few points that it has no proof for asked anew."""
    values, places, proven = sifted
    rows = (~proven).nonzero()[:, 0]
    if len(rows):
        for top, value, place in nearest(points[rows], points, k, own=rows, memory=memory):
            some = rows[top : top + len(value)]
            values[some], places[some] = value, place
    for top in range(0, len(points), _SIDE):
        yield top, values[top : top + _SIDE], places[top : top + _SIDE]


def mutual(points: Float[Tensor, "N D"], k: int, *, side: int = _SIDE) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
    """The same where every point asks every other one, at half the products: a score serves the row and the column that it stands in.

    Blocks come in an order in which every point meets the others by rising number, as ties ask for. For few neighbours and on a CPU,
    where products are what takes the time.

    Args:
        points: all of them.
        k: how many neighbours; less than there are points.
        side: how many rows and columns of scores at a time, a multiple of 16.
    """
    count = len(points)
    points = torch.nn.functional.pad(points, (0, 0, 0, -count % PEAK))  # with points that nobody finds, for whole peaks
    values, places = points.new_empty(len(points), 0), torch.empty(len(points), 0, dtype=torch.int64)
    held = list(zip(values.split(side), places.split(side), strict=True))
    scores = points.new_empty(side * side)
    for row, some in enumerate(points.split(side)):
        for column, others in enumerate(points[row * side :].split(side), row):
            score = scores[: len(some) * len(others)].view(len(some), len(others))
            with exactly(points.device):
                torch.mm(some, others.T, out=score)
            score[:, count - column * side :] = -torch.inf
            if row == column:
                score.fill_diagonal_(-torch.inf)
            mine, theirs = _newcomers(score, held[row][0], held[column][0] if column > row else None, k)
            held[row] = _merge(held[row], mine, column * side, k)
            if theirs is not None:
                held[column] = _merge(held[column], theirs, row * side, k)
        value, place = (part[: count - row * side] for part in held[row])
        held[row] = (value[:0], place[:0])
        yield row * side, value, place.masked_fill_(value == -torch.inf, -1)


def _merge(held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], left: int, k: int) -> tuple[Tensor, Tensor]:
    """The k best of what is held and of what is new. What is held has lower columns: a stable sort leaves it before its equals."""
    values, order = torch.cat([held[0], new[0]], 1).sort(dim=1, descending=True, stable=True)
    return values[:, :k], torch.cat([held[1], new[1] + left], 1).gather(1, order[:, :k])


_Found = tuple[Float[Tensor, "R M"], Int[Tensor, "R M"]]


def _newcomers(
    score: Float[Tensor, "R B"], held: Float[Tensor, "R K"], held_by_columns: Float[Tensor, "B K"] | None, k: int
) -> tuple[_Found, _Found | None]:
    """What in a block is better than the last of what its row holds; and, where columns ask too, than the last of what its column holds."""
    rows, columns = score.shape
    none = score.new_full((1,), torch.inf)
    row_bar = held[:, -1] if held.shape[1] == k else none.expand(rows)
    column_bar = held_by_columns[:, -1] if held_by_columns is not None and held_by_columns.shape[1] == k else none.expand(columns)
    by_row, by_column = above(score, row_bar, column_bar)
    mine = _listed(*by_row, rows, k) if held.shape[1] == k else None
    theirs = None
    if held_by_columns is not None:
        theirs = _listed(*by_column, columns, k) if held_by_columns.shape[1] == k else None
        theirs = theirs or best(score.T.contiguous(), min(k, rows))
    return mine or best(score, min(k, columns)), theirs


def _listed(who: Int[Tensor, "P"], where: Int[Tensor, "P"], value: Float[Tensor, "P"], count: int, k: int) -> _Found | None:
    """What each has found, a row each, filled up with -inf; None where somebody has found too many for that."""
    who, order = who.sort(stable=True)  # what comes after one another for everyone has rising places, as it had before
    rank = nth(who, count)
    width = int(rank.max()) + 1 if len(rank) else 0
    if width > 4 * k:
        return None
    values, places = value.new_full((count, width), -torch.inf), torch.zeros(count, width, dtype=torch.int64)
    values[who, rank], places[who, rank] = value[order], where[order]
    return values, places


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """float32 means float32: no TF32, no bfloat16 and no autocast in here, whatever the program around has asked for."""
    torch_backends: Any = torch.backends  # its stubs do not know oneDNN's settings
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
    """How many rows and columns of scores fit."""
    whole = _tile(answers, k) == 1
    column = 4 * (size + 8) if whole else 2 * size  # a sort needs room for its result, its places and its work
    row = 24 * k * (size + 8)  # candidates, their places, what is held and what is merged
    rows = memory // (column * answers + row)
    if rows >= min(_ROWS, queries):
        return min(rows, queries), answers
    rows = max(1, min(_ROWS, queries, memory // (2 * row)))
    return rows, min(answers, max(_COLUMNS, (memory // rows - row) // column))


def _forbid(score: Float[Tensor, "R B"], column: Int[Tensor, "R"]) -> None:
    """Put -inf into one column a row, if the row has that column; written without asking the device which ones do."""
    inside = ((column >= 0) & (column < score.shape[1]))[:, None]
    column = column.clamp(0, score.shape[1] - 1)[:, None]
    score.scatter_(1, column, torch.where(inside, -torch.inf, score.gather(1, column)))


def _tile(columns: int, k: int) -> int:
    """How many columns share one peak; 1 where looking at peaks first would save nothing."""
    tile = 16 if k <= 64 else 4
    return tile if columns >= 2 * tile * (k + 1) else 1


def best(score: Float[Tensor, "R B"], k: int) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """The k largest of each row and their columns, in order, equals by column."""
    if _tile(score.shape[1], k) == 1:
        whole = score.sort(dim=1, descending=True, stable=True)
        return whole.values[:, :k], whole.indices[:, :k]
    # One more than asked for: if it is smaller than the last, no tie was cut in two.
    if score.is_cuda:
        values, columns = score.topk(k + 1)
    else:
        columns = _candidates(score, k + 1)
        values, order = score.gather(1, columns).topk(k + 1)
        columns = columns.gather(1, order)
    tied = (values[:, 1:] == values[:, :-1]).any(1).nonzero()[:, 0]
    step = max(1, score.numel() // (16 * score.shape[1]))
    for some in tied.split(step):
        values[some, :k], columns[some, :k] = _settle(score[some], values[some, k - 1 : k], k)
    return values[:, :k], columns[:, :k]


def _candidates(score: Float[Tensor, "R B"], k: int) -> Int[Tensor, "R K"]:
    """k columns a row that hold its k largest values, in any order.

    The k largest lie in the k tiles of largest peaks, since each of those peaks is as large as the smallest of them. So a row is read
    once, to find the peaks, and the search goes on among few columns. On a CPU this halves the time of topk; a GPU has no use for it.
    """
    tile = _tile(score.shape[1], k)
    if tile == 1:
        return score.topk(k, sorted=False).indices
    tiles = score.shape[1] // tile
    # Columns of a tile lie `tiles` apart: their maximum is then a maximum of long vectors.
    peaks = score[:, : tiles * tile].unflatten(1, (tile, tiles)).amax(1)
    chosen = _candidates(peaks, k)
    inside = (chosen[:, None, :] + torch.arange(0, tiles * tile, tiles, device=score.device)[:, None]).flatten(1)
    rest = torch.arange(tiles * tile, score.shape[1], device=score.device).expand(len(score), -1)
    columns = torch.cat([inside, rest], 1)
    return columns.gather(1, score.gather(1, columns).topk(k, sorted=False).indices)


def _settle(score: Float[Tensor, "R B"], last: Float[Tensor, "R 1"], k: int) -> tuple[Float[Tensor, "R K"], Int[Tensor, "R K"]]:
    """The same for rows with ties: everything above the last value, and as many of its equals as there is room for, lowest first."""
    above, equal = score > last, score == last
    room = k - above.sum(1, keepdim=True)
    columns = (above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))).nonzero()[:, 1].view(len(score), k)
    order = score.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return order.values, columns.gather(1, order.indices)
