"""Drift of queries: their Frechet distance from the gallery, and the predicted recall."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from scipy import stats
from sklearn.isotonic import isotonic_regression

from unimetric.datasets.files import LABEL
from unimetric.deploy.building import open_source
from unimetric.deploy.index import Index, sample_gallery
from unimetric.errors import UnimetricError
from unimetric.files import check_writable, write_json
from unimetric.geometry.frechet import frechet
from unimetric.geometry.wilson import wilson
from unimetric.images.pack import decode

#: File of an index folder with recall by distance.
CURVE = "shift.json"
#: Images of the gallery that the queries are compared with, and dimensions that both are projected to.
_MOST, _DIM = 20_000, 32
_FEWEST = 8


def watch(
    path: str | Path,
    queries: str | Path,
    *,
    level: float = 0.99,
    draws: int = 200,
    fit: bool = False,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare a folder of queries with the gallery of an index.

    The distance of as many images of the gallery from the rest of it, drawn again and again, is the null distribution: the distance of
    queries without drift. Queries are outside if their distance exceeds its quantile.

    Args:
        path: Index folder.
        queries: Folder of images, or csv file with a column `path`. With a column `label`, recall@1 of the labeled queries is measured.
        level: Quantile of the null distribution that the distance may reach.
        draws: Draws of the null distribution.
        fit: Whether to measure recall by distance on changed images of the gallery, if this was not done before.
        device: Device of the model.
        progress: Callback with (finished images, all images).

    Returns:
        `distance`, `limit`, `null` (mean and quantiles), `p`, `outside`, `score` (mean of the nearest images), `recall` if it was
        measured by distance, and `measured` if queries have labels. `queries` and `gallery` are the numbers of images in the distance,
        at most half as many queries as gallery images; `readable` is the number of all readable queries.
    """
    with Index.open(path, device=device).check_complete() as index:
        raw, paths, labels, problem = _embed(index, queries, progress)
        if len(raw) < _FEWEST:
            message = f"{queries}: a distance needs at least {_FEWEST} readable images, got {len(raw)}{problem}"
            raise UnimetricError(message, "name more images")
        gallery = _sample(index)
        curve = open_curve(index, fit=fit, progress=progress)
        nearest, scores = _find_nearest(index, raw, paths)
        measured = _measure_recall(index, nearest, labels)
        found = _points(index, raw)
    readable = len(found)
    if len(gallery) < 2 * len(found):
        found = found[np.random.default_rng(0).permutation(len(found))[: len(gallery) // 2]]
    if len(found) < _FEWEST:
        raise UnimetricError(f"{path}: the gallery has too few images ({len(gallery)})", f"it needs at least {2 * _FEWEST}")
    reference = Reference(gallery)
    null, distance = reference.null(len(found), draws), reference.distance(found)
    limit = float(np.quantile(null, level))
    result: dict[str, Any] = {
        "queries": len(found),
        "readable": readable,
        "gallery": len(gallery),
        "distance": distance,
        "limit": limit,
        "level": level,
        "null": {"mean": float(null.mean()), "low": float(np.quantile(null, 1 - level)), "high": limit},
        "ratio": distance / max(float(null.mean()), 1e-12),
        "p": float((1 + (null >= distance).sum()) / (1 + len(null))),
        "outside": distance > limit,
        "score": float(scores.mean()),
    }
    if curve is not None:
        result["recall"] = predict_recall(curve, excess=distance - float(null.mean()), score=result["score"])
    return result | ({} if measured is None else {"measured": measured})


def _find_nearest(index: Index, raw: np.ndarray, paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return id and score of the image nearest to each query, except for its own file."""
    ids, scores = index.search_vectors(raw, 2)
    own = [os.path.realpath(index.image_path(id_)) == os.path.realpath(path) for id_, path in zip(ids[:, 0], paths, strict=True)]
    rows = np.arange(len(ids))
    return ids[rows, np.array(own, int)], scores[rows, np.array(own, int)]


def _measure_recall(index: Index, nearest: np.ndarray, labels: list[Any]) -> dict[str, Any] | None:
    """Return recall@1 of the labeled queries with Wilson's interval, or None without labels."""
    rows = [row for row, label in enumerate(labels) if label is not None and nearest[row]]
    if not rows:
        return None
    if LABEL not in index.columns:
        message = "%s: has no column `label`, so the recall of labeled queries is not measured; build it with `--labels` or a csv file"
        logging.getLogger("unimetric").warning(message, index.path)
        return None
    held = index.fetch([nearest[row] for row in rows])[LABEL]
    right = sum(str(mine) == str(labels[row]) for mine, row in zip(held, rows, strict=True))
    low, high = wilson(right / len(rows), len(rows), 0.95)
    return {"recall": right / len(rows), "low": low, "high": high, "level": 0.95, "queries": len(rows)}


def _sample(index: Index) -> np.ndarray:
    """Return points of the gallery, at equal steps if there are many."""
    points = sample_gallery(index, _MOST)[1]
    if not len(points):
        raise UnimetricError(f"{index.path}: has no images", "add some with `unimetric index`")
    return points


def _embed(index: Index, queries: str | Path, progress: Callable[[int, int], None] | None) -> tuple[np.ndarray, list[str], list[Any], str]:
    """Return embeddings, paths and labels of the readable queries, and the first problem."""
    items = list(open_source(queries, labels=False).files())
    parts = [np.zeros((0, index.facts.dim), np.float32)]
    embedded, done, problem = [], 0, ""
    for readings, embeddings in index.embedder.stream(((item.path, None) for item in items), workers=0):
        for item, reading in zip(items[done:], readings, strict=False):
            if reading.embedded:
                embedded.append(item)
            else:
                problem = problem or f"; `{item.id}`: {reading.problem}"
        parts.append(embeddings.cpu().numpy())
        done += len(readings)
        if progress is not None:
            progress(done, len(items))
    raw = np.concatenate(parts)
    usable = np.flatnonzero(np.isfinite(raw).all(1) & raw.any(1))
    held = [embedded[row] for row in usable]
    return raw[usable], [item.path for item in held], [item.columns.get(LABEL) for item in held], problem


def _points(index: Index, raw: np.ndarray) -> np.ndarray:
    """Return raw embeddings as points like those of `_sample`, if a store can hold them."""
    vectors, valid = index.facts.placement.vectors(index.place(raw))
    return index.facts.placement.points(vectors[valid])


class Reference:
    """Points of a gallery that queries are compared with.

    Queries and gallery are projected to the principal components of the gallery. A covariance of few points in many dimensions is
    mostly noise, which would hide the drift. What the gallery does not contain is one more coordinate, the distance from the components.

    Args:
        gallery: (N, D) points.
    """

    def __init__(self, gallery: np.ndarray) -> None:
        self.center = gallery.mean(0, dtype=np.float64).astype(np.float32)
        centered = gallery.astype(np.float32) - self.center
        # A product in float32 takes half the time, and its error is far below that of the sample.
        self.directions = np.linalg.eigh((centered.T @ centered).astype(np.float64))[1][:, ::-1][:, :_DIM].astype(np.float32)
        self.points = self._project(gallery)
        self.moments = self._moments(self.points)
        self.null = cache(self._null)

    def _project(self, points: np.ndarray) -> np.ndarray:
        centered = points.astype(np.float32) - self.center
        inside = centered @ self.directions
        rest = np.sqrt(np.maximum((centered**2).sum(1) - (inside**2).sum(1), 0))
        return np.concatenate([inside, rest[:, None]], 1).astype(np.float64)

    @staticmethod
    def _moments(points: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        return len(points), points.sum(0), points.T @ points

    def distance(self, queries: np.ndarray) -> float:
        """Return the Frechet distance of queries (Q, D) from the gallery."""
        return _distance(self._moments(self._project(queries)), self.moments)

    def _null(self, size: int, draws: int) -> np.ndarray:
        """Return the distances of random parts of the gallery of some size from its rest."""
        rng = np.random.default_rng(0)
        distances = np.empty(draws)
        for draw in range(draws):
            part = self._moments(self.points[rng.choice(len(self.points), size, replace=False, shuffle=False)])
            # The moments of the rest are differences, so that a draw reads its part only.
            rest = (self.moments[0] - part[0], self.moments[1] - part[1], self.moments[2] - part[2])
            distances[draw] = _distance(part, rest)
        return distances


def _distance(some: tuple[int, np.ndarray, np.ndarray], other: tuple[int, np.ndarray, np.ndarray]) -> float:
    """Return the Frechet distance between sets, by their numbers, sums and sums of products."""
    gaussians = []
    for count, total, products in (some, other):
        mean = total / count
        gaussians += [torch.from_numpy(mean), torch.from_numpy((products - count * np.outer(mean, mean)) / (count - 1))]
    return float(frechet(*gaussians))


# --- recall ------------------------------------------------------------------------------------------------------------

_CHANGES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "blur": lambda image, strength: image.filter(ImageFilter.GaussianBlur(strength * max(image.size) / 50)),
    "darkness": lambda image, strength: ImageEnhance.Brightness(image).enhance(1 - 0.85 * strength),
    "resolution": lambda image, strength: image.resize([max(2, int(side * (1 - 0.93 * strength))) for side in image.size]),
    "gray": lambda image, strength: ImageEnhance.Color(image).enhance(1 - strength),
    "zoom": lambda image, strength: image.crop(_middle(image.size, 1 - 0.75 * strength)),
}
_STRENGTHS = (0.25, 0.5, 0.75, 1.0)


def _middle(size: tuple[int, int], part: float) -> tuple[float, float, float, float]:
    width, height = size
    return width * (1 - part) / 2, height * (1 - part) / 2, width * (1 + part) / 2, height * (1 + part) / 2


def fit_curve(index: Index, *, images: int = 100, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Measure recall@1 on images of the gallery that are changed more and more.

    The distances of `unimetric shift` are between class means of other features, so its curve cannot be used here.

    Args:
        index: Open index with a column `label`.
        images: Number of images of the gallery.
        progress: Callback with (finished images, all images).

    Returns:
        `excess`, the distances beyond the mean of the null distribution, `score`, the mean scores of the nearest images, `recall`, and
        `change`, the name of each change.
    """
    if LABEL not in index.columns:
        raise UnimetricError(f"{index.path}: recall needs a column `label`", "build it with `--labels`, or without `--fit`")
    ids, labels = [], []
    for some, _, columns in index.store.scan():
        ids += some
        labels += columns[LABEL]
    times = Counter(labels)
    usable = [row for row, label in enumerate(labels) if label is not None and times[label] > 1]
    if len(usable) < _FEWEST:
        raise UnimetricError(f"{index.path}: recall needs classes of several images", "build it with `--labels`")
    rows = np.random.default_rng(0).permutation(usable)[: min(images, len(ids) // 2)]
    originals = [Image.fromarray(decode(index.image_path(ids[row]))) for row in rows]
    reference = Reference(_sample(index))
    found: dict[str, list[Any]] = {"excess": [], "score": [], "recall": [], "change": []}
    settings = [("none", 0.0), *((name, strength) for name in _CHANGES for strength in _STRENGTHS)]
    for number, (name, strength) in enumerate(settings):
        raw = index.embed([_CHANGES[name](image, strength) if strength else image for image in originals])
        points = _points(index, raw)
        near, scores = _find_nearest(index, raw, [index.image_path(ids[row]) for row in rows])
        held = index.fetch(list(near))[LABEL]
        found["excess"].append(reference.distance(points) - float(reference.null(len(points), 200).mean()))
        found["score"].append(float(scores.mean()))
        found["recall"].append(float(np.mean([held[each] == labels[row] for each, row in enumerate(rows)])))
        found["change"].append(f"{name} {strength:g}")
        if progress is not None:
            progress((number + 1) * len(rows), len(settings) * len(rows))
    return found


def open_curve(index: Index, *, fit: bool, progress: Callable[[int, int], None] | None) -> dict[str, Any] | None:
    """Return the curve of this version of an index, or None; measure it if wanted."""
    file = index.path / CURVE
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if held["version"] == index.facts.version and len(held["excess"]) == len(held["recall"]) >= 4:
            return dict(held)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is not whole
    if not fit:
        return None
    check_writable(file)
    # The index on disk may have changed since it was opened.
    found = fit_curve(index, progress=progress) | {"version": index.facts.version}
    write_json(file, found)
    return found


def predict_recall(curve: dict[str, Any], **signals: float) -> dict[str, Any]:
    """Predict the recall from the distance or the score of queries, whichever errs less.

    Each kind of change is predicted by the other kinds. Their errors choose the signal, and their quantile is the interval.

    Args:
        curve: Result of `fit_curve`.
        signals: `excess`, the distance beyond the mean of the null distribution, and `score`, the mean score of the nearest images.

    Returns:
        `expected`, `low`, `high`, `level`; `by`, the signal; `error`, its mean error; `extrapolated`, whether it is beyond the curve;
        `correlation`, its rank correlation with recall.
    """
    y = np.array(curve["recall"], float)
    kinds = np.array([str(name).partition(" ")[0] for name in curve["change"]] if "change" in curve else np.arange(len(y)).astype(str))
    best: dict[str, Any] = {}
    for name, value in signals.items():
        if name not in curve:  # an earlier version has saved the curve
            continue
        x = np.array(curve[name], float)
        rest = np.empty(len(y))
        for kind in set(kinds):
            own = kinds == kind
            rest[own] = np.abs(y[own] - _fit(x[~own], y[~own], x[own], name))
        error = float(rest.mean())
        if not best or error < best["error"]:
            expected, width = float(_fit(x, y, np.array([value]), name)[0]), float(np.quantile(rest, 0.95))
            best = {
                "expected": expected,
                "low": max(0.0, expected - width),
                "high": min(1.0, expected + width),
                "level": 0.95,
                "by": name,
                "error": error,
                "extrapolated": bool(value > x.max() if name == "excess" else value < x.min()),
                "correlation": float(stats.spearmanr(x, y).statistic),
            }
    return best


def _fit(x: np.ndarray, y: np.ndarray, at: np.ndarray, name: str) -> np.ndarray:
    """Return the isotonic fit of recall, which falls with distance and rises with the score."""
    order = np.argsort(x, kind="stable")
    return np.interp(at, x[order], isotonic_regression(y[order], increasing=name != "excess"))
