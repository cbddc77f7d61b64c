"""Recall of an approximate search, measured against the exact one on the stored vectors.

Queries are stored points, which must not find themselves. A result counts if its score reaches that of the
last exact neighbor, so that equal scores do not lower the recall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from unimetric.errors import UnimetricError
from unimetric.geometry.nearest import nearest
from unimetric.geometry.wilson import wilson
from unimetric.stores._points import no_hits

Setting = TypeVar("Setting")
#: Numbers of neighbors for which settings are tuned, and queries to measure each. A search for more neighbors is exact.
DEPTHS = {10: 500, 100: 100}
#: Vectors, and a function that returns the ids of some of their rows.
Block = tuple[Float[np.ndarray, "N D"], Callable[[Int[np.ndarray, "M"]], Sequence[str]]]
Search = Callable[[Float[np.ndarray, "Q D"], int], tuple[np.ndarray, Float[np.ndarray, "Q k"]]]

#: Scores that differ by less are equal. It is above the rounding of sums in float32.
_TIE = 2e-6


def exact_search(blocks: Iterable[Block], queries: Float[np.ndarray, "Q D"], k: int) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
    """Return the ids and scores of the k nearest points of each query, in one pass.

    Args:
        blocks: All vectors, some at a time.
        queries: Unit vectors.
        k: Number of points per query.
    """
    ids, scores = no_hits(len(queries), k)
    asking = torch.from_numpy(np.ascontiguousarray(queries))
    for vectors, name in blocks if len(queries) else ():
        for top, values, columns in nearest(asking, torch.from_numpy(vectors), min(k, len(vectors))) if len(vectors) else ():
            rows = slice(top, top + len(values))
            merged = np.concatenate([scores[rows], values.numpy()], axis=1)
            order = np.argsort(-merged, axis=1, kind="stable")[:, :k]
            kept, places = np.unique(columns.numpy(), return_inverse=True)
            named = np.array(name(kept), dtype=object)[places.reshape(columns.shape)]
            ids[rows] = np.take_along_axis(np.concatenate([ids[rows], named], axis=1), order, 1)
            scores[rows] = np.take_along_axis(merged, order, 1)
    return ids, scores


@dataclass(frozen=True)
class Truth:
    """Stored points as queries, and the score of the last of their k exact neighbors.

    Args:
        ids: Ids of the queries, which must not find themselves.
        queries: Vectors of the queries.
        last: Score of the k-th exact neighbor of each query.
        k: Number of neighbors, less than the number of points.
    """

    ids: np.ndarray
    queries: Float[np.ndarray, "Q D"]
    last: Float[np.ndarray, "Q"]
    k: int

    def half(self, number: int) -> Truth:
        """Return every second query: 0 to choose settings with, 1 to measure."""
        return Truth(self.ids[number::2], self.queries[number::2], self.last[number::2], self.k)

    def recall(self, search: Search) -> float:
        """Return the mean fraction of exact neighbors that a search finds.

        Args:
            search: Function of queries and k that returns ids and scores.
        """
        ids, scores = search(self.queries, self.k + 1)
        own = ids == self.ids[:, None]
        scores = np.sort(np.where(own, -np.inf, scores), axis=1)[:, ::-1][:, : self.k]
        return float((scores >= self.last[:, None] - _TIE).mean())


def draw_points(blocks: Callable[[], Iterable[Block]], count: int, *, number: int) -> tuple[Float[np.ndarray, "N D"], list[str]]:
    """Draw stored points, in one pass. Return their vectors and ids.

    Args:
        blocks: Function that returns all vectors, some at a time.
        count: Number of points.
        number: Number of points to draw. Fewer if there are fewer points.
    """
    rows = np.sort(np.random.default_rng(0).choice(count, min(count, number), replace=False))
    found: list[np.ndarray] = []
    ids: list[str] = []
    first = 0
    for vectors, name in blocks():
        here = rows[(rows >= first) & (rows < first + len(vectors))] - first
        found.append(vectors[here])
        ids += name(here)
        first += len(vectors)
    return np.concatenate(found), ids


def draw_truth(blocks: Callable[[], Iterable[Block]], count: int, *, k: int, queries: int) -> Truth:
    """Draw stored points as queries and find their exact neighbors, in two passes.

    Args:
        blocks: Function that returns all vectors, some at a time.
        count: Number of points.
        k: Number of neighbors.
        queries: Number of queries, half of them to choose settings and half to measure. Fewer if there are fewer points.
    """
    asked, ids = draw_points(blocks, count, number=queries)
    _, scores = exact_search(blocks(), asked, k + 1)  # the query itself has the largest score
    order = np.random.default_rng(1).permutation(len(asked))
    return Truth(np.array(ids, dtype=object)[order], asked[order], scores[order, k], k)


def tune(ladder: Sequence[Setting], search: Callable[[Setting], Search], truth: Truth, target: float) -> tuple[Setting, dict[str, Any]]:
    """Return the cheapest setting that reaches a recall, and what was measured.

    Half of the queries choose the setting by bisection, the other half measures it. If the measured recall is
    too low, the next setting is measured.

    Args:
        ladder: Settings by ascending cost and recall.
        search: Function of a setting that returns its search.
        truth: Queries and their exact neighbors.
        target: Required recall.

    Raises:
        UnimetricError: No setting reaches the recall.
    """
    choosing, measuring = truth.half(0), truth.half(1)
    low, high = 0, len(ladder) - 1
    while low < high:
        middle = (low + high) // 2
        # Half of the way to 1 is spare, so that the measurement seldom fails, and new queries reach the target as well.
        if choosing.recall(search(ladder[middle])) >= target + (1 - target) / 2:
            high = middle
        else:
            low = middle + 1
    reached = 0.0
    for setting in ladder[low:]:
        reached = measuring.recall(search(setting))
        if reached >= target:
            bounds = wilson(reached, len(measuring.ids))
            measured = {"recall": reached, "low": bounds[0], "high": bounds[1], "k": truth.k, "queries": len(measuring.ids)}
            return setting, {key: round(value, 6) for key, value in measured.items()}
    raise UnimetricError(
        f"recall {target} at {truth.k} cannot be reached on these vectors, the best was {reached:.4f}",
        "use a lower `recall`, `recall=1` for an exact scan, or the store `flat`",
    )


def tuned(report: Mapping[str, Any], k: int, *, recall: float, place: str) -> Mapping[str, Any] | None:
    """Return the settings for k neighbors. None if the search must be exact.

    Args:
        report: `Store.report`.
        k: Number of neighbors.
        recall: Required recall.
        place: Name of the store, for the error.

    Raises:
        UnimetricError: The measured recall is below the required one.
    """
    depth = next((each for each in DEPTHS if k <= each), None)
    settings = report.get("settings", {}).get(str(depth))
    if settings is None or recall == 1:
        return None
    if settings["recall"] < recall:
        raise UnimetricError(
            f"{place}: the measured recall {settings['recall']} is below the required {recall}", "run `unimetric index` again"
        )
    return settings


def is_tuned(report: Mapping[str, Any], recall: float) -> bool:
    """Return whether all settings of a report reach a recall."""
    settings = report.get("settings", {})
    return bool(settings) and all(each["recall"] >= recall for each in settings.values())
