"""A space of embeddings: what every metric is a function of. It looks for neighbours once, exactly, in bounded memory.

A score is one inner product in every geometry, larger is nearer: a point that asks and a point that answers are each given the
coordinates that make it so, and one search serves them all.

N pictures, D dimensions, Q queries, G gallery items, C classes, K neighbours, H hits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError, closest
from unimetric.geometry.kmeans import kmeans
from unimetric.geometry.nearest import nearest

GEOMETRIES = ("cosine", "euclidean", "inner", "poincare")


class Average(float):
    """A mean over queries that remembers what it is the mean of.

    Args:
        each: (M,) its terms, one for every query that has a match.
        classes: (M,) the class of each of these queries.
    """

    each: Float[Tensor, "M"]
    classes: Int[Tensor, "M"]

    def __new__(cls, each: Float[Tensor, "M"], classes: Int[Tensor, "M"]) -> Average:
        self = super().__new__(cls, float(each.mean()))
        self.each, self.classes = each, classes
        return self


@dataclass(frozen=True)
class Hits:
    """Where the matches of some queries stand among their neighbours: all that a retrieval metric needs, and no (Q, G) matrix.

    Args:
        query: (H,) which of these queries a hit belongs to.
        rank: (H,) its place among the query's neighbours; the nearest has 1.
        nth: (H,) it is its query's nth hit.
        relevant: (Q,) how many matches a query has in the gallery, found or not, itself left out.
        members: (Q,) the same, the query itself counted where it stands in the gallery: n_c, the size of its class there.
    """

    query: Int[Tensor, "H"]
    rank: Int[Tensor, "H"]
    nth: Int[Tensor, "H"]
    relevant: Int[Tensor, "Q"]
    members: Int[Tensor, "Q"]

    def count(self, within: int | Int[Tensor, "Q"]) -> Float[Tensor, "Q"]:
        """How many hits a query has among its first neighbours, as many as `within` says."""
        return self._total(torch.ones_like(self.rank, dtype=torch.float64), within)

    def precision(self, within: int | Int[Tensor, "Q"]) -> Float[Tensor, "Q"]:
        """Sum of the precision at a query's hits: for each, the share of hits among the neighbours up to and including it."""
        return self._total(self.nth.to(torch.float64) / self.rank, within)

    def first(self, within: int) -> Float[Tensor, "Q"]:
        """One over the rank of a query's first hit; zero where there is none."""
        return self._total((self.nth == 1).to(torch.float64) / self.rank, within)

    def _total(self, values: Float[Tensor, "H"], within: int | Int[Tensor, "Q"]) -> Float[Tensor, "Q"]:
        limit = within[self.query] if isinstance(within, Tensor) else within
        length = torch.bincount(self.query, minlength=len(self.relevant))
        # Sums of sorted runs: they add in one order on every device, as index_add_ would not.
        return torch.segment_reduce(values.where(self.rank <= limit, 0), "sum", lengths=length, unsafe=True, initial=0)


class Rerank(Protocol):
    """Puts the first `depth` neighbours of some queries into another order: what `unimetric.geometry.rerank` gives to a space."""

    depth: int

    def __call__(self, start: int, near: Int[Tensor, "R K"], /) -> Int[Tensor, "R K"]:
        """The columns of the gallery that the queries from `start` on have found, in their new order."""
        ...

    def again(self, space: Space, /) -> Rerank:
        """The same for another space."""
        ...


class Space:
    """Embeddings and labels, the queries among them and the gallery that answers.

    A query without a match in the gallery (alone in its class, say) cannot be answered. It still stands in the gallery, is left out
    of every mean over queries, and `unmatched` counts it.

    Args:
        embeddings: (N, D) as the model gives them. float64 is searched in float64, everything else in float32.
        labels: (N,) any integers. Classes of different sources are different classes, whatever their labels.
        query: (N,) bool, pictures that ask; all, if not given.
        gallery: (N,) bool, pictures that answer; all, if not given. A picture that does both never answers itself.
        geometry: "cosine", "euclidean", "inner" (the inner product of points as they are: longer ones are nearer to all) or "poincare"
            (points of a ball, always searched in float64).
        source: (N,) number of the dataset that a picture is from; one dataset, if not given.
        source_names: the names of the datasets, by number.
        memory: bytes that a search may take beyond the points themselves and what it gives back.
        seed: of the clustering.
        curvature: c of the ball, whose radius is 1/sqrt(c); for "poincare" only.
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
        memory: int = 1 << 29,
        seed: int = 0,
        curvature: float = 0.1,
    ) -> None:
        if geometry not in GEOMETRIES:
            raise UnimetricError(f"no geometry `{geometry}`", closest(geometry, GEOMETRIES))
        points = torch.as_tensor(embeddings).detach()
        if points.ndim != 2 or not len(points):
            raise UnimetricError(f"embeddings have shape {tuple(points.shape)}", "give one row a picture, at least one: (N, D)")
        if not torch.stack(points.aminmax()).isfinite().all():
            raise UnimetricError("embeddings hold NaN or infinity", "the model has diverged: lower its learning rate, or clip its gradient")
        self.geometry, self.memory, self.seed, self.curvature = geometry, memory, seed, curvature
        self.size, self.device = len(points), points.device
        self.points = self._place(points)
        self.source = self._column("source", source, torch.int64, 0)
        self.sources = int(self.source.max()) + 1
        self.source_names = tuple(source_names) or tuple(str(number) for number in range(self.sources))
        names, labels = torch.unique(self._column("labels", labels, torch.int64, 0), return_inverse=True)
        known, self.labels = torch.unique(self.source * len(names) + labels, return_inverse=True)
        self.classes = len(known)
        self._choose(self._column("query", query, torch.bool, True), self._column("gallery", gallery, torch.bool, True))
        self.rerank: Rerank | None = None
        self._clusters: dict[tuple[int, int, str], Tensor] = {}

    def _column(self, name: str, values: Tensor | np.ndarray | None, dtype: torch.dtype, default: float) -> Tensor:
        column = torch.full((self.size,), default) if values is None else torch.as_tensor(values)
        if column.shape != (self.size,):
            raise UnimetricError(
                f"{name} has shape {tuple(column.shape)}, but there are {self.size} embeddings", "give one value a picture"
            )
        if dtype == torch.int64 and column.is_floating_point():
            raise UnimetricError(f"{name} holds {column.dtype}", "give integers")
        if dtype == torch.bool and column.dtype != torch.bool:
            raise UnimetricError(f"{name} holds {column.dtype}", f"give a mask: `{name} = np.isin(np.arange(N), rows)`")
        return column.to(self.device, dtype)

    def _choose(self, query: Bool[Tensor, "N"], gallery: Bool[Tensor, "N"]) -> None:
        self.query, self.gallery = query.nonzero()[:, 0], gallery.nonzero()[:, 0]
        self.queries, self.answers = len(self.query), len(self.gallery)
        column = torch.where(gallery, gallery.cumsum(0) - 1, -1)
        self.own = column[self.query]  # (Q,) the column of the gallery in which a query itself stands, or -1
        counts = torch.bincount(self.labels[self.gallery], minlength=self.classes)
        self.relevant = counts[self.labels[self.query]] - (self.own >= 0).long()
        self.matched = (self.relevant > 0).nonzero()[:, 0]
        self.unmatched = self.queries - len(self.matched)
        self.most_relevant = int(self.relevant.max()) if self.queries else 0
        self._expected = 1
        self._held: tuple[int, Hits] | None = None

    # --- geometry ----------------------------------------------------------------------------------------------------

    def _place(self, points: Tensor) -> Float[Tensor, "N D"]:
        """The points that are measured: unit vectors, vectors as they are, or vectors checked to lie within the ball."""
        if self.geometry == "poincare":
            points = points.to(torch.float64)
            if (largest := float(points.norm(dim=1).max()) * self.curvature**0.5) >= 1:
                raise UnimetricError(
                    f"a point lies outside the ball of curvature {self.curvature} (at {largest:.3f} of its radius)",
                    "give the curvature that the embeddings were made with, or use geometry='cosine'",
                )
        elif points.dtype != torch.float64:
            points = points.to(torch.float32)
        return points / points.norm(dim=1, keepdim=True).clamp_min(1e-6) if self.geometry == "cosine" else points

    def sides(self) -> tuple[Float[Tensor, "N E"], Float[Tensor, "N E"]]:
        """Coordinates whose inner product grows as the distance shrinks, of the points as they ask and as they answer.

            euclidean: -|x - y|^2 / 2           =  <x, y> - |y|^2 / 2 + (what is the same for every y)
            poincare:  -|x - y|^2 / (1 - c y^2) =  <2x, y> / (1 - c y^2) - x^2 / (1 - c y^2) - y^2 / (1 - c y^2)

        and the distance in the ball, (1/sqrt c) arcosh(1 + 2c |x - y|^2 / ((1 - c x^2)(1 - c y^2))), grows with the latter for a fixed x.
        """
        points = self.points
        if self.geometry == "euclidean":  # around their mean and within the unit ball, where float32 is finest; no order changes
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

    # --- neighbours --------------------------------------------------------------------------------------------------

    def expect(self, k: int) -> None:
        """Say how deep metrics are going to look, so that the first search is deep enough for all of them."""
        self._expected = max(self._expected, k)

    def neighbors(self, k: int) -> Int[Tensor, "Q K"]:
        """The k nearest gallery items of every query, nearest first, as rows of the space; -1 where there are no more.

        Args:
            k: how many; at most all of the gallery.
        """
        return torch.cat([torch.where(near >= 0, self.gallery[near], -1) for _, near in self._search(k)])

    neighbours = neighbors  # the old spelling

    def _search(self, k: int) -> Iterator[tuple[int, Int[Tensor, "R K"]]]:
        if not 0 < k <= self.answers:
            raise UnimetricError(f"k={k} neighbours of a gallery of {self.answers}", "give a k from 1 to the size of the gallery")
        ask, answer = self.sides()
        ask = ask if self.queries == self.size else ask[self.query]
        answer = answer if self.answers == self.size else answer[self.gallery]
        depth = k if self.rerank is None else min(max(k, self.rerank.depth), self.answers)
        for start, _, near in nearest(ask, answer, depth, own=self.own, memory=self.memory):
            yield start, near if self.rerank is None else self.rerank(start, near)[:, :k]

    def hits(self, k: int) -> Iterator[Hits]:
        """The matches among (at least) the k nearest neighbours, some queries at a time.

        They are kept, so that the next metric needs no search; unless they would not fit the memory, as with two classes of 50,000
        pictures each and a k as large. Then each metric searches anew.
        """
        if self._held is not None and self._held[0] >= min(k, self.answers):
            yield self._held[1]
            return
        depth = min(max(k, self._expected), self.answers)
        queries, ranks, size = [], [], 0
        labels = self.labels.to(torch.int32)
        answers = torch.cat([labels[self.gallery], labels.new_tensor([-1])])  # a column of -1 finds the last one: no class
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
        """The mean over queries of a value of their hits among the k nearest; queries without a match are left out.

        Args:
            k: how deep the value looks; it is handed hits at least so deep.
            value: given some queries' hits, gives (Q,) one number a query.
        """
        if k < 1:
            raise UnimetricError(f"k={k} neighbours", "look at one neighbour at least")
        if not len(self.matched):
            raise UnimetricError(
                f"none of {self.queries} queries has a picture of its class in the gallery of {self.answers}",
                "check the labels, and that query and gallery share classes",
            )
        each = torch.cat([value(hits).to(torch.float64) for hits in self.hits(k)])
        return Average(each[self.matched], self.labels[self.query[self.matched]])

    # --- parts, sums and clusters ------------------------------------------------------------------------------------

    def within(self, rows: Bool[Tensor, "N"]) -> Space:
        """The space of some of the pictures only, with their queries, their gallery and their classes; put in order anew if this one is.

        Args:
            rows: which pictures.
        """
        asks, answers = torch.zeros_like(rows), torch.zeros_like(rows)
        asks[self.query], answers[self.gallery] = True, True
        part = copy.copy(self)
        part.points, part.source = self.points[rows], self.source[rows]
        known, part.labels = torch.unique(self.labels[rows], return_inverse=True)
        part.size, part.classes = len(part.points), len(known)
        part.rerank, part._clusters = None, {}
        part._choose(asks[rows], answers[rows])
        return part if self.rerank is None or not part.queries else part.reordered(self.rerank.again(part))

    def reordered(self, rerank: Rerank) -> Space:
        """The same space, whose queries find their neighbours in another order.

        Args:
            rerank: what puts them in order.
        """
        other = copy.copy(self)
        other.rerank, other._held = rerank, None
        return other

    def spectrum(self) -> Float[Tensor, "D"]:
        """The singular values of the points, largest first, in float64; those below the rounding of the points are zero.

        By a QR decomposition of some rows at a time below the triangle of the rows before: D^2 numbers are kept, and small singular
        values keep their digits, which they would lose in the product of the matrix with itself.
        """
        dim = self.points.shape[1]
        triangle = torch.empty(0, dim, dtype=torch.float64, device=self.device)
        for some in self.points.split(max(dim, self.memory // (64 * dim))):
            triangle = torch.linalg.qr(torch.cat([triangle, some.to(torch.float64)]), mode="r").R
        values = torch.linalg.svdvals(triangle)
        return values.where(values > torch.finfo(self.points.dtype).eps * values[0], 0)

    def sums(self) -> tuple[Float[Tensor, "C D"], Int[Tensor, "C"]]:
        """The sum of the unit vectors of each class, in float64, and how many they are."""
        total = torch.zeros(self.classes, self.points.shape[1], dtype=torch.float64, device=self.device)
        rows = max(1, self.memory // (32 * self.points.shape[1]))
        for some, labels in zip(self.points.split(rows), self.labels.split(rows), strict=True):
            some = some.to(torch.float64)
            total.index_add_(0, labels, some / some.norm(dim=1, keepdim=True).clamp_min(1e-6))
        return total, torch.bincount(self.labels, minlength=self.classes)

    def clusters(self, *, k: int | None = None, iterations: int = 20, seeding: str = "random") -> Int[Tensor, "N"]:
        """The cluster of every picture, by k-means on the points (in the ball: on their images under the logarithm at its centre).

        Args:
            k: how many clusters; as many as classes, if not given.
            iterations: how often centres move.
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
