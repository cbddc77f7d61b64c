"""Drift of queries: their Frechet distance from the gallery, and the predicted recall."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from scipy import stats
from sklearn.isotonic import isotonic_regression

from unimetric.datasets.files import files
from unimetric.deploy.index import Index
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.geometry.frechet import frechet_distance
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
        queries: Folder of images, or csv file with a column `path`.
        level: Quantile of the null distribution that the distance may reach.
        draws: Draws of the null distribution.
        fit: Whether to measure recall by distance on changed images of the gallery, if this was not done before.
        device: Device of the model.
        progress: Callback with (finished images, all images).

    Returns:
        `distance`, `limit`, `null` (mean and quantiles), `p`, `outside`, numbers of images, and `recall` if it was measured by distance.
    """
    with Index.open(path, device=device) as index:
        found = _embed(index, queries, progress)
        gallery = _sample(index)
        curve = open_curve(index, fit=fit, progress=progress)
    if len(found) < _FEWEST:
        raise UnimetricError(f"{queries}: a distance needs at least {_FEWEST} readable images, got {len(found)}", "name a larger folder")
    if len(gallery) < 2 * len(found):
        found = found[np.random.default_rng(0).permutation(len(found))[: len(gallery) // 2]]
    if len(found) < _FEWEST:
        raise UnimetricError(f"{path}: the gallery has too few images ({len(gallery)})", f"it needs at least {2 * _FEWEST}")
    gallery, found = _project(gallery, found)
    null, distance = _distances(gallery, found, draws)
    limit = float(np.quantile(null, level))
    result: dict[str, Any] = {
        "queries": len(found),
        "gallery": len(gallery),
        "distance": distance,
        "limit": limit,
        "level": level,
        "null": {"mean": float(null.mean()), "low": float(np.quantile(null, 1 - level)), "high": limit},
        "ratio": distance / max(float(null.mean()), 1e-12),
        "p": float((1 + (null >= distance).sum()) / (1 + len(null))),
        "outside": distance > limit,
    }
    if curve is not None:
        result["recall"] = predict_recall(curve, distance - float(null.mean()))
    return result


def _sample(index: Index) -> np.ndarray:
    """Return points of the gallery, at equal steps if there are many."""
    step = max(1, -(-len(index) // _MOST))
    parts = []
    seen = 0
    for ids, vectors, _ in index.store.scan():
        parts.append(vectors[-seen % step :: step])
        seen += len(ids)
    if not parts:
        raise UnimetricError(f"{index.path}: has no images", "add some with `unimetric index`")
    return index.facts.placement.points(np.concatenate(parts)).astype(np.float64)


def _embed(index: Index, queries: str | Path, progress: Callable[[int, int], None] | None) -> np.ndarray:
    """Return the points of all readable queries."""
    table = files(root=str(queries))
    parts = []
    for start in range(0, len(table.paths), 64):
        good = []
        for path in table.paths[start : start + 64]:
            try:
                good.append(index.embed([path])[0])
            except UnimetricError:  # an unreadable query has no place
                continue
        if good:
            points = index.place(np.stack(good))
            vectors, valid = index.facts.placement.vectors(points)
            parts.append(index.facts.placement.points(vectors[valid]))
        if progress is not None:
            progress(min(start + 64, len(table.paths)), len(table.paths))
    return np.concatenate(parts).astype(np.float64) if parts else np.zeros((0, index.facts.dim))


def _project(gallery: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Project both to the principal components of the gallery.

    A covariance of few points in many dimensions is mostly noise, which would hide the drift. What the gallery does not contain is
    kept as one more coordinate, the distance from the components.
    """
    center = gallery.mean(0)
    centered = gallery - center
    directions = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, : min(_DIM, gallery.shape[1])]

    def along(points: np.ndarray) -> np.ndarray:
        inside = (points - center) @ directions
        rest = np.sqrt(np.maximum(((points - center) ** 2).sum(1) - (inside**2).sum(1), 0))
        return np.concatenate([inside, rest[:, None]], 1)

    return along(gallery), along(queries)


def _distances(gallery: np.ndarray, queries: np.ndarray, draws: int) -> tuple[np.ndarray, float]:
    """Return the null distribution of the distance, and the distance of the queries."""
    rng, size = np.random.default_rng(0), len(queries)
    points = torch.from_numpy(gallery)
    null = np.empty(draws)
    for draw in range(draws):
        order = torch.from_numpy(rng.permutation(len(points)))
        null[draw] = float(frechet_distance(points[order[:size]], points[order[size:]]))
    return null, float(frechet_distance(torch.from_numpy(queries), points))


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
    """Measure recall@1 by distance on images of the gallery that are changed more and more.

    The distances of `unimetric shift` are between class means of other features, so its curve cannot be used here.

    Args:
        index: Open index with a column `label`.
        images: Number of images of the gallery.
        progress: Callback with (finished images, all images).

    Returns:
        `excess`, the distances beyond the mean of the null distribution, `recall`, and `change`, the name of each change.
    """
    if "label" not in index.columns:
        raise UnimetricError(f"{index.path}: recall needs a column `label`", "build it with `--labels`, or without `--fit`")
    ids, labels = [], []
    for some, _, columns in index.store.scan():
        ids += some
        labels += columns["label"]
    times = Counter(labels)
    usable = [row for row, label in enumerate(labels) if label is not None and times[label] > 1]
    if len(usable) < _FEWEST:
        raise UnimetricError(f"{index.path}: recall needs classes of several images", "build it with `--labels`")
    rows = np.random.default_rng(0).permutation(usable)[: min(images, len(ids) // 2)]
    originals = [Image.fromarray(decode(index.image_path(ids[row]))) for row in rows]
    gallery = _sample(index)
    found: dict[str, list[Any]] = {"excess": [], "recall": [], "change": []}
    settings = [("none", 0.0), *((name, strength) for name in _CHANGES for strength in _STRENGTHS)]
    for number, (name, strength) in enumerate(settings):
        changed = [_CHANGES[name](image, strength) if strength else image for image in originals]
        raw = index.embed(changed)
        points = index.facts.placement.points(index.facts.placement.vectors(index.place(raw))[0]).astype(np.float64)
        null, distance = _distances(*_project(gallery, points), draws=20)
        near, _ = index.search_vectors(raw, 2)
        nearest = [next((each for each in some if each != ids[row]), "") for some, row in zip(near, rows, strict=True)]
        held = index.fetch(nearest)["label"]
        found["excess"].append(distance - float(null.mean()))
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
        if held["version"] == index.version and len(held["excess"]) == len(held["recall"]) >= 4:
            return dict(held)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is not whole
    if not fit:
        return None
    found = fit_curve(index, progress=progress) | {"version": index.version}
    write_text(file, json.dumps(found, indent=1))
    return found


def predict_recall(curve: dict[str, Any], excess: float, level: float = 0.95) -> dict[str, Any]:
    """Predict the recall at a distance, with the spread of the measured points.

    Args:
        curve: Result of `fit_curve`.
        excess: Distance beyond the mean of the null distribution.
        level: Level of the interval for one new set of queries.
    """
    x, y = np.array(curve["excess"], float), np.array(curve["recall"], float)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    fitted = isotonic_regression(y, increasing=False)
    # Each point is predicted by the others, because the fit passes through lone points.
    rest = []
    for each in range(len(x)):
        others = np.arange(len(x)) != each
        rest.append(y[each] - float(np.interp(x[each], x[others], isotonic_regression(y[others], increasing=False))))
    width = float(np.quantile(np.abs(rest), level))
    expected = float(np.interp(excess, x, fitted))
    low, high = max(0.0, expected - width), min(1.0, expected + width)
    correlation = float(stats.spearmanr(x, y).statistic)
    return {
        "expected": expected,
        "low": low,
        "high": high,
        "level": level,
        "extrapolated": bool(excess > x[-1]),
        "correlation": correlation,
    }
