"""Space of embeddings, the input of every metric. Neighbors are searched once, exactly.

In every geometry, a score is one inner product, and larger is nearer. Queries and gallery items get
coordinates that make it so, and one search in bounded memory serves all geometries.

N images, D dimensions, Q queries, G gallery items, C classes, K neighbors, H hits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, overload

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError, closest
from unimetric.geometry.barred import Barred
from unimetric.geometry.kmeans import kmeans
from unimetric.geometry.nearest import nearest, search_memory

GEOMETRIES = ("cosine", "euclidean", "inner", "poincare")
#: Gallery items that a query does not find: those of its class and group, those of its group, or none.
GROUP_RULES = ("class", "group", "none")
#: Largest coordinate of points in float32. The squares of larger ones overflow, so that they are searched in float64.
_LARGE = 1e15
#: Largest number of datasets without names.
_MOST_SOURCES = 2**16
#: Number of neighbors up to which a search takes about as long as that for the nearest one.
_SHALLOW = 64


class Average(float):
    """Mean over queries that stores its terms.

    Args:
        each: (M,) terms, one for every query with a match.
        classes: (M,) class of each of these queries.
    """

    each: Float[Tensor, "M"]
    classes: Int[Tensor, "M"]

    def __new__(cls, each: Float[Tensor, "M"], classes: Int[Tensor, "M"]) -> Average:
        self = super().__new__(cls, float(each.mean()))
        self.each, self.classes = each, classes
        return self


@dataclass(frozen=True)
class Hits:
    """Ranks of the matches of some queries among their neighbors, without a (Q, G) matrix.

    Retrieval metrics need nothing else.

    Args:
        query: (H,) query that a hit belongs to.
        rank: (H,) rank among the neighbors of the query. The nearest has rank 1.
        nth: (H,) number of the hit among the hits of its query, from 1.
        relevant: (Q,) number of matches of a query in the gallery, found or not, without the query
            itself.
        members: (Q,) the same, including the query itself if it is in the gallery: n_c, the size of
            its class there.
    """

    query: Int[Tensor, "H"]
    rank: Int[Tensor, "H"]
    nth: Int[Tensor, "H"]
    relevant: Int[Tensor, "Q"]
    members: Int[Tensor, "Q"]

    def count(self, within: int | Int[Tensor, "Q"]) -> Float[Tensor, "Q"]:
        """Count the hits of each query among its first `within` neighbors."""
        return self.total(torch.ones_like(self.rank, dtype=torch.float64), within)

    def precision(self, within: int | Int[Tensor, "Q"]) -> Float[Tensor, "Q"]:
        """Sum the precision at each hit of a query.

        The precision at a hit is the fraction of hits among the neighbors up to and including it.
        """
        return self.total(self.nth.to(torch.float64) / self.rank, within)

    def first(self, within: int) -> Float[Tensor, "Q"]:
        """Return one over the rank of the first hit of each query, or zero if there is none."""
        return self.total((self.nth == 1).to(torch.float64) / self.rank, within)

    def total(self, values: Float[Tensor, "H"], within: int | Int[Tensor, "Q"]) -> Float[Tensor, "Q"]:
        """Sum a value of each hit over the hits of a query among its first `within` neighbors."""
        # A larger number would overflow the type of the ranks, and compare as a negative one.
        limit = within[self.query] if isinstance(within, Tensor) else min(within, torch.iinfo(self.rank.dtype).max)
        length = torch.bincount(self.query, minlength=len(self.relevant))
        # Sums of sorted runs have the same order of addition on every device, unlike index_add_.
        return torch.segment_reduce(values.where(self.rank <= limit, 0), "sum", lengths=length, unsafe=True, initial=0)


def scale_to_unit(points: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Return x / |x|, and zero for a zero vector.

    Lengths whose square is not a number of this type are scaled first. Points whose lengths are all 1 up
    to rounding are returned as they are, not copied.
    """
    length = points.norm(dim=1, keepdim=True)
    if bool(((length - 1).abs() <= 4 * torch.finfo(points.dtype).eps).all()):
        return points
    outside = (length < 1e-6) | length.isinf()
    if bool(outside.any()):
        peak = points.abs().amax(1, keepdim=True)
        points = torch.where(outside & (peak > 0), points / peak, points)
        length = points.norm(dim=1, keepdim=True)
    return points / length.clamp_min(1e-6)


def _rows(points: Float[Tensor, "N D"], index: Int[Tensor, "M"]) -> Float[Tensor, "M D"]:
    """Return rows in ascending order, without a copy if they are consecutive."""
    if len(index) == len(points):
        return points
    if len(index) == 0:
        return points[:0]
    first, last = int(index[0]), int(index[-1])
    return points[first : last + 1] if last - first + 1 == len(index) else points[index]


def _are_codes(points: Float[Tensor, "N D"]) -> bool:
    """Return whether all coordinates have the same absolute value."""
    size = points[0, 0].abs()
    return all(bool((some.abs() == size).all()) for some in (points[0], points))  # the first point decides in most cases


class Rerank(Protocol):
    """Interface of `geometry.rerank`, which reorders the first `depth` neighbors of queries."""

    depth: int

    def __call__(self, start: int, near: Int[Tensor, "R K"], /) -> Int[Tensor, "R K"]:
        """Return the gallery columns found by the queries from `start` on, in their new order."""
        ...

    def again(self, space: Space, /) -> Rerank:
        """Return the reranking of another space."""
        ...


class Space:
    """Embeddings and labels, divided into queries and a gallery.

    A query without a match in the gallery (for example, alone in its class) cannot be evaluated. It
    stays in the gallery, is excluded from every mean over queries, and is counted by `unmatched`.
    `lost` counts those of them that have matches, all of them left out by the group rule.

    Args:
        embeddings: (N, D) output of the model. float64 is searched in float64, everything else in
            float32, except if squares overflow there.
        labels: (N,) any integers. Classes of different sources are different, whatever their
            labels.
        query: (N,) bool mask of the queries. Defaults to all images.
        gallery: (N,) bool mask of the gallery. Defaults to all images. An image in both never finds
            itself.
        geometry: "cosine", "euclidean", "inner" (inner product of the vectors as they are: longer
            ones are nearer to all) or "poincare" (points of the Poincaré ball, always searched in
            float64).
        source: (N,) dataset number of each image. Defaults to one dataset.
        source_names: Names of the datasets, by number.
        group: (N,) camera, encounter, video, patient or day of each image. -1 if it has none. Defaults
            to none.
        group_rule: Gallery items that are left out of the ranking of a query, neither right nor wrong:
            "class", those of its class and group, as in Market-1501; "group", all of its group; "none".
        junk: Labels of images that are neither queries nor gallery items.
        distractors: Labels of images that are in the gallery, match nothing and are not queries.
        names: Name of each image, for errors.
        memory: Bytes that a search may use in addition to the points and its result. By default half a
            GiB on a CPU, and an eighth of the free memory of a GPU, at most four GiB.
        seed: Seed of the clustering.
        curvature: Curvature c of the Poincaré ball, whose radius is 1/sqrt(c). Only for "poincare".
    """

    def __init__(
        self,
        embeddings: Float[Tensor, "N D"] | np.ndarray,
        labels: Int[Tensor, "N"] | np.ndarray,
        query: Bool[Tensor, "N"] | np.ndarray | None = None,
        gallery: Bool[Tensor, "N"] | np.ndarray | None = None,
        *,
        geometry: str = "cosine",
        source: Int[Tensor, "N"] | np.ndarray | None = None,
        source_names: Sequence[str] = (),
        group: Int[Tensor, "N"] | np.ndarray | None = None,
        group_rule: str = "class",
        junk: Sequence[int] = (),
        distractors: Sequence[int] = (),
        names: Sequence[str] = (),
        memory: int | None = None,
        seed: int = 0,
        curvature: float = 0.1,
    ) -> None:
        if geometry not in GEOMETRIES:
            raise UnimetricError(f"unknown geometry `{geometry}`", closest(geometry, GEOMETRIES))
        if group_rule not in GROUP_RULES:
            raise UnimetricError(f"unknown group rule `{group_rule}`", closest(group_rule, GROUP_RULES))
        if geometry == "poincare" and not curvature > 0:
            raise UnimetricError(f"`curvature` must be above 0, got {curvature}", "use the curvature of the embeddings, such as 0.1")
        try:
            points = torch.as_tensor(embeddings).detach()
        except (TypeError, ValueError) as error:
            raise UnimetricError(f"`embeddings` must hold numbers: {error}", "stack rows: `torch.stack(embeddings)`") from None
        if points.ndim != 2 or not points.numel() or points.is_complex():
            got = f"{tuple(points.shape)} of {points.dtype}"
            raise UnimetricError(f"embeddings must be real and have shape (N, D) with N and D >= 1, got {got}", "use one row per image")
        if not torch.stack(points.aminmax()).isfinite().all():
            raise UnimetricError(
                "embeddings must be finite, got NaN or infinity",
                "the model has diverged: lower its learning rate or clip its gradient; before training, weights or device are faulty",
            )
        self.geometry, self.seed, self.curvature = geometry, seed, curvature
        self.memory = search_memory(points.device) if memory is None else memory
        self.size, self.device = len(points), points.device
        self.points = self._place(points)
        self.source = self._column("source", source, torch.int64, 0)
        self.sources, self.source_names = self._name_sources(tuple(source_names))
        self.group, self.group_rule, self.names = self._column("group", group, torch.int64, -1), group_rule, names
        if (self.group < -1).any():
            raise UnimetricError(
                f"`group` must be at least 0, or -1 for none, got {int(self.group.min())}",
                "number the groups: `np.unique(group, return_inverse=True)[1]`",
            )
        labels = self._column("labels", labels, torch.int64, 0)
        junked, distracting = (torch.isin(labels, torch.as_tensor(some).to(labels)) for some in (junk, distractors))
        kinds, labels = torch.unique(labels, return_inverse=True)
        known, self.labels = torch.unique(self.source * len(kinds) + labels, return_inverse=True)
        self.classes = len(known)
        query, gallery = self._column("query", query, torch.bool, True), self._column("gallery", gallery, torch.bool, True)
        self._choose(query & ~junked & ~distracting, gallery & ~junked)
        self.rerank: Rerank | None = None
        self._clusters: dict[tuple[int, int, str], Tensor] = {}

    def _column(self, name: str, values: Tensor | np.ndarray | None, dtype: torch.dtype, default: float) -> Tensor:
        try:
            column = torch.full((self.size,), default) if values is None else torch.as_tensor(values)
        except (TypeError, ValueError) as error:  # such as names of classes
            hint = f"number names by `np.unique({name}, return_inverse=True)[1]`"
            raise UnimetricError(f"`{name}` must hold numbers: {error}", hint) from None
        if column.shape != (self.size,):
            raise UnimetricError(
                f"`{name}` must have one value per embedding ({self.size}), got shape {tuple(column.shape)}",
                f"use an array of shape ({self.size},)",
            )
        if dtype == torch.int64 and column.is_floating_point():
            raise UnimetricError(f"`{name}` must hold integers, got {column.dtype}", f"convert it: `{name}.astype(np.int64)`")
        if dtype == torch.bool and column.dtype != torch.bool:
            raise UnimetricError(f"`{name}` must be a bool mask, got {column.dtype}", f"use a mask: `{name} = np.isin(np.arange(N), rows)`")
        return column.to(self.device, dtype)

    def _name_sources(self, names: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Return the number of datasets and their names."""
        if len(set(names)) < len(names):
            raise UnimetricError(f"`source_names` must be different, got {', '.join(names)}", "name each dataset once")
        low, high = (int(each) for each in self.source.aminmax())
        most = len(names) or _MOST_SOURCES
        if low < 0 or high >= most:
            hint = "number the datasets: `source_names, source = np.unique(source, return_inverse=True)`"
            raise UnimetricError(f"`source` must be from 0 to {most - 1}, got {low} to {high}", hint)
        return high + 1, names or tuple(str(number) for number in range(high + 1))

    def _choose(self, query: Bool[Tensor, "N"], gallery: Bool[Tensor, "N"]) -> None:
        self.query, self.gallery = query.nonzero()[:, 0], gallery.nonzero()[:, 0]
        self.queries, self.answers = len(self.query), len(self.gallery)
        column = torch.where(gallery, gallery.cumsum(0) - 1, -1)
        self.own = column[self.query]  # (Q,) gallery column of the query itself, or -1
        counts = torch.bincount(self.labels[self.gallery], minlength=self.classes)
        possible = counts[self.labels[self.query]] - (self.own >= 0).long()
        self._bar()
        self.relevant = possible
        if self.barred is not None:
            # An image has its own code, so this count includes the query itself if it is in the gallery.
            same = Barred(self._pair_codes[self.query], self._pair_codes[self.gallery]).counts()
            self.relevant = possible + (self.own >= 0).long() - same
        self.lost = ((possible > 0) & (self.relevant == 0)).nonzero()[:, 0]
        self.matched = (self.relevant > 0).nonzero()[:, 0]
        self.unmatched = self.queries - len(self.matched)
        self.most_relevant = int(self.relevant.max()) if self.queries else 0
        # Metrics of the class size usually follow, and a few more neighbors cost little. A deep search would cost much.
        depth = self.most_relevant + 1
        self._expected = depth if depth <= _SHALLOW else 1
        self._held: tuple[int, Hits] | None = None
        self._top: tuple[Tensor, Tensor] | None = None

    def _bar(self) -> None:
        """Give each image a code. A query does not find the gallery items of its code."""
        self.barred: Barred | None = None
        grouped = self.group >= 0
        if self.group_rule == "none" or not grouped.any():
            return
        alone = -1 - torch.arange(self.size, device=self.device)  # an image without a group shares its code with none
        group = torch.unique(self.group, return_inverse=True)[1]  # the product of a large number would overflow
        self._pair_codes = torch.where(grouped, group * self.classes + self.labels, alone)
        codes = self._pair_codes if self.group_rule == "class" else torch.where(grouped, self.group, alone)
        self.barred = Barred(codes[self.query], codes[self.gallery])

    # --- geometry ----------------------------------------------------------------------------------------------------

    def _place(self, points: Tensor) -> Float[Tensor, "N D"]:
        """Return the points to search: unit vectors, plain vectors, or checked hyperbolic points."""
        if self.geometry == "poincare":
            points = points.to(torch.float64)
            largest = float(points.norm(dim=1).max()) * self.curvature**0.5
            if largest >= 1:
                raise UnimetricError(
                    f"points must be inside the Poincaré ball of curvature {self.curvature}, got one at {largest:.3f} of its radius",
                    "use the curvature of the embeddings, or `geometry='cosine'`",
                )
        elif points.dtype != torch.float64:
            large = self.geometry != "cosine" and float(torch.stack(points.aminmax()).abs().max()) > _LARGE
            points = points.to(torch.float64 if large else torch.float32)
        if self.geometry == "cosine":
            return scale_to_unit(points)
        return points

    def sides(self) -> tuple[Float[Tensor, "N E"], Float[Tensor, "N E"]]:
        """Return coordinates whose inner product falls with distance, of queries and gallery.

            euclidean: -|x - y|^2 / 2 = <x, y> - |y|^2 / 2 + (constant in y)
            poincare:  -|x - y|^2 / (1 - c y^2) = (<2x, y> - x^2 - y^2) / (1 - c y^2)

        For a fixed x, the distance in the Poincaré ball, (1/sqrt c) arcosh(1 + 2c |x - y|^2 / ((1 -
        c x^2)(1 - c y^2))), is a monotonic function of the latter.
        """
        points = self.points
        if self.geometry == "cosine" and _are_codes(points):
            points = points.sign()  # their products are integers, so that equal scores are equal after rounding
        if self.geometry == "euclidean":
            # Shifting and scaling keep the order. float32 is most precise near the origin.
            points = points - points.mean(0)
            points = points / points.norm(dim=1).max().clamp_min(1e-12)
        if self.geometry in ("cosine", "inner"):
            return points, points
        square = points.square().sum(1, keepdim=True)
        if self.geometry == "euclidean":
            return torch.cat([points, torch.ones_like(square)], 1), torch.cat([points, -square / 2], 1)
        scale = 1 / (1 - self.curvature * square)
        ask = torch.cat([2 * points, -square, -torch.ones_like(square)], 1)
        return ask, torch.cat([points * scale, scale, square * scale], 1)

    # --- neighbors ---------------------------------------------------------------------------------------------------

    def expect(self, k: int) -> None:
        """Set the depth that metrics will need, so that the first search is deep enough for all."""
        self._expected = max(self._expected, k)

    @overload
    def neighbors(self, k: int, *, scores: Literal[False] = False) -> Int[Tensor, "Q K"]: ...
    @overload
    def neighbors(self, k: int, *, scores: Literal[True]) -> tuple[Int[Tensor, "Q K"], Float[Tensor, "Q K"]]: ...
    def neighbors(self, k: int, *, scores: bool = False) -> Int[Tensor, "Q K"] | tuple[Int[Tensor, "Q K"], Float[Tensor, "Q K"]]:
        """Return the k nearest gallery items of every query, nearest first.

        Args:
            k: Number of neighbors, at most the size of the gallery.
            scores: Whether to return their scores as well: cosine, inner product, or minus the distance, so that larger is nearer.
                Reranked neighbors keep the scores of the space.

        Returns:
            (Q, K) row numbers of the space. -1 if there are no more, with a score of -inf.
        """
        found = torch.cat([torch.where(near >= 0, self.gallery[near], -1) for _, near in self._search(k)])
        if not scores:
            return found
        rows = max(1, self.memory // (32 * k * self.points.shape[1]))
        parts = zip(self.query.split(rows), found.split(rows), strict=True)
        return found, torch.cat([self._scores(query, near) for query, near in parts])

    def _scores(self, query: Int[Tensor, "R"], near: Int[Tensor, "R K"]) -> Float[Tensor, "R K"]:
        x, y = self.points[query][:, None], self.points[near.clamp_min(0)]
        if self.geometry in ("cosine", "inner"):
            score = (x * y).sum(2)
        elif self.geometry == "euclidean":
            score = -(x - y).norm(dim=2)
        else:
            inside = (1 - self.curvature * x.square().sum(2)) * (1 - self.curvature * y.square().sum(2))
            score = -(1 + 2 * self.curvature * (x - y).square().sum(2) / inside).acosh() / self.curvature**0.5
        return score.where(near >= 0, -torch.inf)

    neighbours = neighbors  # the old spelling

    def score_all(self, x: Float[Tensor, "R D"], y: Float[Tensor, "B D"]) -> Float[Tensor, "R B"]:
        """Return the score of every pair of points: cosine, inner product, or minus the distance.

        Args:
            x: Points of the space, as in `points`.
            y: Other points of the space. Distances should be computed in float64.
        """
        product = x @ y.T
        if self.geometry in ("cosine", "inner"):
            return product
        x2, y2 = x.square().sum(1)[:, None], y.square().sum(1)
        square = (x2 + y2 - 2 * product).clamp_min(0)
        if self.geometry == "euclidean":
            return -square.sqrt()
        inside = (1 - self.curvature * x2) * (1 - self.curvature * y2)
        return -(1 + 2 * self.curvature * square / inside).acosh() / self.curvature**0.5

    def nearest(self) -> tuple[Int[Tensor, "Q"], Float[Tensor, "Q"]]:
        """Return the nearest gallery item of every query and its score, searched once.

        They are -1 and -inf if there is none.
        """
        if self._top is None:
            near, scores = self.neighbors(1, scores=True)
            self._top = near[:, 0], scores[:, 0]
        return self._top

    @property
    def unknown(self) -> Int[Tensor, "U"]:
        """Queries without another image of their class in the gallery, whatever its group."""
        none = self.relevant == 0
        none[self.lost] = False
        return none.nonzero()[:, 0]

    def _search(self, k: int) -> Iterator[tuple[int, Int[Tensor, "R K"]]]:
        if not 0 < k <= self.answers:
            raise UnimetricError(
                f"`k` must be between 1 and the size of the gallery ({self.answers}), got k={k}", f"use a k from 1 to {self.answers}"
            )
        ask, answer = self.sides()
        ask, answer = _rows(ask, self.query), _rows(answer, self.gallery)
        depth = k if self.rerank is None else min(max(k, self.rerank.depth), self.answers)
        for start, _, near in self._find(ask, answer, depth):
            yield start, near if self.rerank is None else self.rerank(start, near)[:, :k]

    def _find(self, ask: Tensor, answer: Tensor, k: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield scores and columns of the k nearest gallery points, some queries at a time."""
        yield from nearest(ask, answer, k, own=self.own, barred=self.barred, memory=self.memory)

    def hits(self, k: int) -> Iterator[Hits]:
        """Yield the matches among (at least) the k nearest neighbors, some queries at a time.

        The result is cached for the next metric, unless it exceeds the memory. An example is two
        classes of 50,000 images each with an equally large k. Then every metric searches again.
        """
        if self._held is not None and self._held[0] >= min(k, self.answers):
            yield self._held[1]
            return
        depth = min(max(k, self._expected), self.answers)
        queries, ranks, size = [], [], 0
        labels = self.labels.to(torch.int32)
        answers = torch.cat([labels[self.gallery], labels.new_tensor([-1])])  # a column of -1 selects the last entry: not a class
        for start, near in self._search(depth):
            rows = slice(start, start + len(near))
            found = (answers[near] == labels[self.query[rows], None]).nonzero().to(torch.int32)
            query, rank = found[:, 0].contiguous(), found[:, 1] + 1
            yield self._hits(query, rank, rows)
            size += 12 * len(query)
            if size <= self.memory:
                queries.append(query + start)
                ranks.append(rank)
        if size <= self.memory:
            self._held = depth, self._hits(torch.cat(queries), torch.cat(ranks), slice(None))

    def _hits(self, query: Int[Tensor, "H"], rank: Int[Tensor, "H"], rows: slice) -> Hits:
        first = torch.searchsorted(query, query, out_int32=True)
        nth = torch.arange(1, len(query) + 1, dtype=torch.int32, device=self.device) - first
        relevant = self.relevant[rows]
        return Hits(query, rank, nth, relevant, relevant + (self.own[rows] >= 0))

    def average(self, k: int, value: Callable[[Hits], Tensor]) -> Average:
        """Average a value of the hits among the k nearest neighbors over all queries with a match.

        Args:
            k: Depth that the value needs. It receives hits of at least this depth.
            value: Function from the hits of some queries to (Q,) one value per query.
        """
        self.check_matches()
        if k < 1:
            raise UnimetricError(f"`k` must be at least 1, got k={k}", "use `k=1` or more")
        each = torch.cat([value(hits).to(torch.float64) for hits in self.hits(k)])
        return Average(each[self.matched], self.labels[self.query[self.matched]])

    def check_matches(self) -> None:
        """Raise an error if no query has a match in the gallery."""
        if not len(self.matched):
            raise UnimetricError(*self._describe_lost())

    def _describe_lost(self) -> tuple[str, str]:
        """Return problem and hint of a space whose queries have no match."""
        if not len(self.lost):
            problem = f"queries need an image of their class in the gallery of {self.answers}, but none of {self.queries} queries has one"
            return problem, "check the labels, and that query and gallery share classes"
        rows = self.query[self.lost[:3]].tolist()
        first = ", ".join(f"`{self.names[row]}`" if len(self.names) else f"row {row}" for row in rows)
        return (
            f"queries need an image of their class from another group, but none of {self.queries} queries has one in the gallery of "
            f"{self.answers}: {len(self.lost)} of them lose every match to the group rule `{self.group_rule}`, the first: {first}",
            "check the groups (one per camera, encounter or day), or use `group_rule='none'`",
        )

    # --- subspaces, sums and clusters --------------------------------------------------------------------------------

    def within(self, rows: Bool[Tensor, "N"]) -> Space:
        """Return the subspace of some images, with their queries, gallery and classes.

        If this space is reranked, the subspace is reranked from its own images.

        Args:
            rows: (N,) bool mask of the images.
        """
        asks, answers = torch.zeros_like(rows), torch.zeros_like(rows)
        asks[self.query], answers[self.gallery] = True, True
        part = copy.copy(self)
        part.points, part.source, part.group = self.points[rows], self.source[rows], self.group[rows]
        part.names = [self.names[row] for row in rows.nonzero()[:, 0].tolist()] if len(self.names) else ()
        known, part.labels = torch.unique(self.labels[rows], return_inverse=True)
        part.size, part.classes = len(part.points), len(known)
        part.rerank, part._clusters = None, {}
        part._choose(asks[rows], answers[rows])
        if self.rerank is None or not part.queries:
            return part
        return part.reordered(self.rerank.again(part))

    def reordered(self, rerank: Rerank) -> Space:
        """Return the same space with its neighbors in another order.

        Args:
            rerank: Function that reorders them.
        """
        other = copy.copy(self)
        other.rerank, other._held, other._top = rerank, None, None
        return other

    def spectrum(self) -> Float[Tensor, "D"]:
        """Return the singular values of the points, largest first, in float64.

        Values below the rounding error of the points are set to zero. A QR decomposition adds some
        rows at a time to the triangle of the previous rows. It stores D^2 numbers, and small
        singular values keep their digits, which the product of the matrix with itself would lose.
        """
        dim = self.points.shape[1]
        triangle = torch.empty(0, dim, dtype=torch.float64, device=self.device)
        for some in self.points.split(max(dim, self.memory // (64 * dim))):
            rows = torch.cat([triangle, some.to(torch.float64)])
            triangle = torch.linalg.qr(rows, mode="r").R
            if triangle.device.type == "cpu" and not triangle.isfinite().all():  # PyTorch for ARM, if all points are equal
                triangle = torch.from_numpy(np.linalg.qr(rows.numpy(), mode="r"))
        values = torch.linalg.svdvals(triangle)
        return values.where(values > torch.finfo(self.points.dtype).eps * values[0], 0)

    def sums(self) -> tuple[Float[Tensor, "C D"], Int[Tensor, "C"]]:
        """Return the sum of the unit vectors of each class in float64, and their number."""
        total = torch.zeros(self.classes, self.points.shape[1], dtype=torch.float64, device=self.device)
        rows = max(1, self.memory // (32 * self.points.shape[1]))
        for some, labels in zip(self.points.split(rows), self.labels.split(rows), strict=True):
            total.index_add_(0, labels, scale_to_unit(some.to(torch.float64)))
        return total, torch.bincount(self.labels, minlength=self.classes)

    def clusters(self, *, k: int | None = None, iterations: int = 20, seeding: str = "random") -> Int[Tensor, "N"]:
        """Return the k-means cluster of every image.

        The Poincaré ball is mapped to its tangent space at the origin by the logarithm first.

        Args:
            k: Number of clusters. Defaults to the number of classes.
            iterations: Number of center updates.
            seeding: "random" or "plusplus".
        """
        key = (k or self.classes, iterations, seeding)
        if key not in self._clusters:
            points = self.points
            if self.geometry == "poincare":
                norm = points.norm(dim=1, keepdim=True).clamp_min(1e-12) * self.curvature**0.5
                points = points * (norm.atanh() / norm)
            self._clusters[key] = kmeans(points, key[0], iterations=iterations, seeding=seeding, seed=self.seed, memory=self.memory).cluster
        return self._clusters[key]
