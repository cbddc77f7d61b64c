"""Data of the report's figures: curves, shifts, spectra, neighbors and maps.

`page.js` draws them.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np

from unimetric.analysis.projection import project
from unimetric.config import split_metric
from unimetric.report.folders import Record
from unimetric.report.numbers import SINGULAR_VALUES, Method, correlations, direction, judges, measured, shift_of, shifts

#: Largest number of points per line of a plot.
_POINTS = 200

#: Largest number of classes per run.
_CLASSES = 500


def curves(found: list[Method]) -> list[dict[str, Any]]:
    """Return plots of the loss and each metric, with the mean of each method over its seeds."""
    keys: dict[str, None] = {}
    for method in found:
        for run in method.runs:
            for line in run.lines:
                keys |= dict.fromkeys(key for key in line if key == "loss" or key.startswith(("test/", "validation/", "train/")))
    keys = {key: None for key in keys if not SINGULAR_VALUES.search(key)}
    plots = []
    names = _long_names(found)
    for key in keys:
        lines = []
        for method in found:
            values: dict[int, list[float]] = {}
            for run in method.runs:
                for line in run.lines:
                    if isinstance(line.get(key), int | float):
                        values.setdefault(line["epoch"], []).append(line[key])
            epochs = sorted(values)
            if len(epochs) > 1:
                kept = sorted({epochs[place] for place in np.linspace(0, len(epochs) - 1, min(_POINTS, len(epochs))).round().astype(int)})
                lines.append({"name": names[method], "x": kept, "y": [_rounded(np.mean(values[epoch])) for epoch in kept]})
        if lines:
            plots.append({"title": key, "xlabel": "epoch", "ylabel": key, "lines": lines})
    return plots


def _long_names(found: list[Method]) -> dict[Method, str]:
    """Return the names of methods, with dataset and split if those of the methods differ."""
    several = len({method.task for method in found}) > 1
    return {method: f"{method.name} ({', '.join(method.task)})" if several else method.name for method in found}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.5g}")


def shift_plots(found: list[Method]) -> list[dict[str, Any]]:
    """Return plots of the first two metrics by shift, one per dataset.

    Line names contain the AGS.
    """
    plots = []
    for judge in judges(measured(found))[:2]:
        every, sign = shifts(found, judge), direction(found, judge)
        for dataset in dict.fromkeys(curve["dataset"] for curve in every):
            lines = [
                {"name": f"{curve['name']}: AGS {100 * curve['ags']:.1f}", "x": curve["x"], "y": curve["y"]}
                for curve in sorted(every, key=lambda curve: -sign * curve["ags"])
                if curve["dataset"] == dataset
            ]
            plots.append({"title": f"{dataset}: {judge}", "xlabel": "Frechet distance", "ylabel": judge, "lines": lines})
    return plots


def correlation_plots(found: list[Method]) -> list[dict[str, Any]]:
    """Return one scatter plot per structure metric, against the first other metric.

    Plots of training embeddings come first. Titles contain the embedded images and Pearson's r.
    """
    metrics = measured(found)
    judge = next(iter(judges(metrics)), "")
    plots = []
    for row in correlations(found, metrics):
        if row["y"] != judge:
            continue
        part, metric = split_metric(row["x"])
        scaled = ", scaled per split" if row["trends"] else ""
        lines = []
        for split in dict.fromkeys(row["splits"]):
            x, y, names = zip(*[point for point, each in zip(row["points"], row["splits"], strict=True) if each == split], strict=True)
            lines.append({"name": split, "x": list(x), "y": list(y), "labels": list(names), "dots": True})
        ends = [min(point[0] for point in row["points"]), max(point[0] for point in row["points"])]
        for name, (slope, intercept) in row["trends"].items():
            lines.append({"name": f"{name}: slope {slope:+.2f}", "x": ends, "y": [slope * end + intercept for end in ends]})
        images = "training" if part == "train" else "test"
        title = f"{row['dataset']}, {images} embeddings{scaled}: r = {row['r']:+.2f}"
        plots.append({"title": title, "xlabel": metric, "ylabel": judge, "lines": lines})
    return sorted(plots, key=lambda plot: "training embeddings" not in plot["title"])


def spectra(found: list[Method]) -> list[dict[str, Any]]:
    """Return plots of singular values, scaled to sum 1.

    Those of the training embeddings, or within classes, are means over seeds of the metrics `singular_values` and `class_spectra`.
    Those of the test embeddings come from the galleries, of the first seed of a method.
    """
    plots = _measured_spectra(found)
    for task in dict.fromkeys(method.task for method in found):
        lines = []
        for method in found:
            run = next((run for run in method.runs if run.gallery), None)
            if method.task == task and run is not None:
                values = run.gallery["spectrum"].astype(float)
                share = values / max(values.sum(), 1e-300)
                kept = np.unique(np.linspace(0, len(share) - 1, min(_POINTS, len(share))).round().astype(int))
                kept = kept[share[kept] > 0]
                lines.append({"name": method.name, "x": (kept + 1).tolist(), "y": [_rounded(share[place]) for place in kept]})
        if lines:
            title = f"{', '.join(task)}: test embeddings"
            plots.append({"title": title, "xlabel": "singular value, largest first", "ylabel": "fraction", "log": True, "lines": lines})
    return plots


def _measured_spectra(found: list[Method]) -> list[dict[str, Any]]:
    lines: dict[tuple[tuple[str, str], str, str], list[dict[str, Any]]] = {}
    for method in found:
        values: dict[tuple[str, str], dict[int, list[float]]] = {}
        for run in method.runs:
            for key, value in run.best.items():
                if key.startswith(("train/", "test/")) and (match := SINGULAR_VALUES.search(key)) and value > 0:
                    values.setdefault((key.partition("/")[0], match[1]), {}).setdefault(int(match[2]), []).append(value)
        for (part, metric), numbers in values.items():
            x = sorted(numbers)
            line = {"name": method.name, "x": x, "y": [_rounded(np.mean(numbers[number])) for number in x]}
            lines.setdefault((method.task, part, metric), []).append(line)
    plots = []
    for (task, part, metric), some in sorted(lines.items(), key=lambda item: item[0][1] != "train"):
        images = "training" if part == "train" else "test"
        within = " within classes" if metric.startswith("class_") else ""
        title = f"{', '.join(task)}: {images} embeddings{within}"
        plots.append({"title": title, "xlabel": "singular value, largest first", "ylabel": "fraction", "log": True, "lines": some})
    return plots


def galleries(found: list[Method], most: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return neighbors and maps of the best runs, and their thumbnails.

    Runs on the same images share thumbnails.

    Args:
        found: Methods.
        most: Largest number of runs.

    Returns:
        One dictionary per run, and thumbnails as data URLs by key.
    """
    judge = next(iter(judges(measured(found))), "")
    runs = [(method, run) for method in found for run in method.runs if run.gallery]
    sign = direction(found, judge)
    runs.sort(key=lambda pair: -np.nan_to_num(sign * pair[1].value(judge), nan=-np.inf))
    thumbnails: dict[str, str] = {}
    long_names = _long_names(found)
    shown = []
    for method, run in runs[:most]:
        keys = _thumbnails(run, thumbnails)
        labels, names = run.gallery["labels"], run.gallery["names"]
        projection, points = project(run.gallery["embeddings"])
        shown.append(
            {
                "name": f"{long_names[method]}, seed {run.settings['seed']}, run {run.run_id}",
                "value": f"{judge} {run.value(judge):.4f}",
                "shift": None if np.isnan(shift_of(run)) else shift_of(run),
                "names": names.tolist(),
                "labels": labels.tolist(),
                "images": keys,
                "queries": run.gallery["queries"].tolist(),
                "neighbors": run.gallery["neighbours"].tolist(),
                "scores": [[_rounded(score) for score in row] for row in run.gallery.get("scores", np.empty((0, 0)))],
                "classes": _classes(run),
                "projection": projection,
                "x": [round(float(value), 3) for value in points[:, 0]],
                "y": [round(float(value), 3) for value in points[:, 1]],
            }
        )
    return shown, thumbnails


def _classes(run: Record) -> list[list[Any]]:
    """Return the hardest classes: name, recall@1, number of queries and most similar class.

    The hardest class comes first.
    """
    if "class_names" not in run.gallery:
        return []
    columns = [run.gallery[f"class_{key}"][:_CLASSES].tolist() for key in ("names", "recall", "queries", "confused")]
    return [[name, _rounded(recall), queries, confused] for name, recall, queries, confused in zip(*columns, strict=True)]


def _thumbnails(run: Record, store: dict[str, str]) -> list[str]:
    data, ends = run.gallery["thumbnails"].tobytes(), run.gallery["ends"].tolist()
    keys = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        image = data[start:end]
        key = hashlib.sha1(image, usedforsecurity=False).hexdigest()[:10]
        store.setdefault(key, "data:image/jpeg;base64," + base64.b64encode(image).decode())
        keys.append(key)
    return keys
