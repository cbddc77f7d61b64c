"""How scores fall as the shift grows, over finished runs and networks without training: `unimetric shift`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.curves import ags, change_against_mean, structure_trend
from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.split import read_features
from unimetric.config import NO_RESULT, RunConfig, load
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Table
from unimetric.metrics import measure
from unimetric.runs.embed import space_of
from unimetric.runs.folder import read_done
from unimetric.spec import bind, create
from unimetric.splits.ood import distances, place_of

Points = dict[str, dict[str, list[dict[str, float]]]]  # method -> split -> numbers of each seed


def shift_report(
    targets: Sequence[str | Path],
    *,
    splits: str = "",
    dataset: str = "",
    metrics: Sequence[str] = ("recall(k=1)",),
    structure: Sequence[str] = (),
    **overrides: Any,
) -> dict[str, Any]:
    """Curves of recall against shift, AGS, changes against the mean over methods, and trends of structure (Milbich et al. 2021).

    Runs that differ in nothing but split and seed are one method, and its seeds are averaged. A network without training (sec. 4.4) is
    given by its features of the whole dataset, an `.npz` file that `unimetric split --features` made, and measured on all splits.

    Args:
        targets: run folders, and `.npz` files.
        splits: the file of splits; needed for `.npz` files, and where the file that runs name is not here.
        dataset: the pictures that the features of an `.npz` file are of.
        metrics: what is compared; runs must have measured it.
        structure: metrics of the training embeddings, such as `spectral_decay`, to set against the first metric (sec. 4.3).
        overrides: settings for measuring the structure, such as `device`. `geometry` also acts on the features of an `.npz` file; scores
            of runs are those that were measured in training.

    Returns:
        `methods`: by name their splits, distances, scores and AGS, and the change against the mean on splits that all of them have;
        `structure`: slope and correlation for each metric of structure.
    """
    if not metrics:
        raise UnimetricError("nothing to compare the runs by", 'name metrics that they have measured: `--metrics "recall(k=1)"`')
    folders = [Path(target) for target in targets if not str(target).endswith(".npz")]
    if structure and not folders:
        raise UnimetricError(
            "features of a network without training have no structure of training", "name runs, or leave `--structure` out"
        )
    configs = {folder: _settings(folder) for folder in folders}
    labels = _labels(configs)
    far: dict[str, float] = {}
    points: Points = {}
    for folder, config in configs.items():
        file, number = _place(config, folder)
        distance = _distance(splits or file, number)
        if far.setdefault(number, distance) != distance:
            raise UnimetricError(
                f"{folder}: its split {number} lies at a distance of {distance:.4g}, that of a run before it at {far[number]:.4g}",
                "compare the runs of one file of splits at a time",
            )
        numbers = _scores(folder, metrics)
        if structure:
            found = evaluate(folder, metrics=list(structure), part="train", **overrides)
            if several := [text for text in structure if text not in found]:
                raise UnimetricError(f"`--structure {several[0]}` gives several numbers", "name metrics that give one, such as `pi_ratio`")
            numbers |= {f"structure/{text}": found[text] for text in structure}
        points.setdefault(labels[folder], {}).setdefault(number, []).append(numbers)
    features = [Path(target) for target in targets if str(target).endswith(".npz")]
    if features:
        if not splits or not dataset:
            raise UnimetricError("features of a network without training need to know the splits", "name `--splits FILE` and `--dataset`")
        far |= {number: distance for number, distance in distances(splits).items() if not number.startswith("key ")}
        table: Table = create("datasets", dataset)
        for path in features:
            points[str(path) if path.stem in points else path.stem] = _without_training(
                path, table, splits, list(metrics), geometry=overrides.get("geometry", "")
            )
    return _report(points, far, list(metrics), list(structure))


def _settings(folder: Path) -> RunConfig:
    if not (folder / "done").is_file():
        raise UnimetricError(f"{folder}: not a finished run", "name folders that `unimetric train` has finished, and .npz files")
    return load(folder / "config.toml")


def _labels(configs: dict[Path, RunConfig]) -> dict[Path, str]:
    """What tells the methods apart: the settings in which they differ, other than split and seed."""
    settings = {folder: asdict(config) for folder, config in configs.items()}
    same = NO_RESULT | {"split", "seed"}
    first = next(iter(settings.values()), {})
    differing = [key for key in first if key not in same and any(values[key] != first[key] for values in settings.values())]
    keys = differing or ["loss"]
    short = {folder: ", ".join(str(values[key]) for key in keys if values[key]) or "none" for folder, values in settings.items()}
    if len(set(short.values())) == len({tuple(values[key] for key in keys) for values in settings.values()}):
        return short
    return {folder: ", ".join(f"{key}={values[key]}" for key in keys) for folder, values in settings.items()}  # values alone would be alike


def _place(config: RunConfig, folder: Path) -> tuple[str, str]:
    """The file and the number of a run's split."""
    place = place_of(config.split)
    if place is None:
        raise UnimetricError(f"{folder}: `split = {config.split!r}` has no distance", "train on splits of `ood(...)` or `published(...)`")
    return place


def _distance(file: str, number: str) -> float:
    known = distances(file)
    if number not in known:
        raise UnimetricError(f"{file} has no split `{number}`", closest(number, known))
    return known[number]


def _scores(folder: Path, metrics: Sequence[str]) -> dict[str, float]:
    line = read_done(folder)
    for metric in metrics:
        if f"test/{metric}" not in line:
            measured = [key.removeprefix("test/") for key in line if key.startswith("test/")]
            raise UnimetricError(f"{folder}: `{metric}` was not measured", closest(metric, measured))
    return {metric: line[f"test/{metric}"] for metric in metrics}


def _without_training(path: Path, table: Table, splits: str, metrics: list[str], *, geometry: str) -> dict[str, list[dict[str, float]]]:
    features = torch.from_numpy(read_features(path, table))
    known = distances(splits)
    ours = any(number.startswith("key ") for number in known)
    found = {}
    for number in (number for number in known if not number.startswith("key ")):
        part, arguments = bind("splits", f"{'ood' if ours else 'published'}(path={splits!r}, split={number})", seed=0)
        rows = part(table, **(arguments if ours else arguments | {"on_missing": "skip"})).test
        numbers = measure(space_of(features[torch.from_numpy(rows)], table, rows, geometry=geometry), metrics)
        if several := [text for text in metrics if text not in numbers]:
            raise UnimetricError(f"`--metrics {several[0]}` gives several numbers", "name metrics that give one, such as `recall(k=1)`")
        found[number] = [numbers]
    return found


def _report(points: Points, far: dict[str, float], metrics: list[str], structure: list[str]) -> dict[str, Any]:
    def mean(method: str, number: str, key: str) -> float:
        return float(np.mean([numbers[key] for numbers in points[method][number]]))

    shared = sorted(set.intersection(*(set(found) for found in points.values())), key=far.__getitem__)
    change = {key: change_against_mean(np.array([[mean(method, n, key) for n in shared] for method in points])) for key in metrics}
    methods: dict[str, Any] = {}
    for row, (method, found) in enumerate(points.items()):
        numbers = sorted(found, key=far.__getitem__)
        where = [far[number] for number in numbers]
        scores = {key: [mean(method, number, key) for number in numbers] for key in metrics}
        methods[method] = {
            "splits": numbers,
            "distances": where,
            "runs": [len(found[number]) for number in numbers],
            "scores": scores,
            "ags": {key: ags(where, values) for key, values in scores.items()} if len(set(where)) > 1 else {},
            "change": {key: dict(zip(shared, values[row].tolist(), strict=True)) for key, values in change.items()},
        }
    trends = {}
    trained = [
        method
        for method, found in points.items()
        if all(f"structure/{key}" in line for n in found.values() for line in n for key in structure)
    ]
    for key in structure:
        grids = [np.array([[mean(method, n, name) for n in shared] for method in trained]) for name in (f"structure/{key}", metrics[0])]
        trends[key] = structure_trend(grids[0], grids[1])._asdict()
    return {"methods": methods, "structure": trends}


def draw_report(path: Path, report: dict[str, Any], metric: str) -> None:
    """Score against shift, one line a method (Milbich et al. 2021, fig. 2).

    Args:
        path: the PNG to write.
        report: what `shift_report` gives.
        metric: which of its metrics.
    """
    with Canvas(path, width=7, height=4) as axes:
        for name, method in report["methods"].items():
            area = f" (AGS {100 * method['ags'][metric]:.1f})" if method["ags"] else ""
            axes.plot(method["distances"], [100 * score for score in method["scores"][metric]], "o-", markersize=4, label=f"{name}{area}")
        axes.set(xlabel="Frechet distance, train to test", ylabel=f"{metric}, %")
        axes.legend(frameon=False, fontsize="small")
