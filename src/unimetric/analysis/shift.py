"""Scores of finished runs and pretrained features over growing shift: `unimetric shift`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.curves import ags, structure_trend, t_interval
from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.split import read_features
from unimetric.config import NO_RESULT, RunConfig, load
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Table
from unimetric.metrics import measure
from unimetric.runs.embed import space_of
from unimetric.runs.folder import expand_studies, read_done
from unimetric.spec import bind, create
from unimetric.splits.ood import distances, place_of

Points = dict[str, dict[str, list[dict[str, float]]]]  # method -> split -> metric values of each seed


def shift_report(
    targets: Sequence[str | Path],
    *,
    splits: str = "",
    dataset: str = "",
    metrics: Sequence[str] = ("recall(k=1)",),
    structure: Sequence[str] = (),
    **overrides: Any,
) -> dict[str, Any]:
    """Compare methods by their scores on splits of growing shift.

    Runs that differ only in split and seed are one method, and its seeds are averaged. Features that are
    not fine-tuned (section 4.3) are an `.npz` file of `unimetric split --features`. They are evaluated on
    all splits.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021).

    Args:
        targets: Run folders, folders of studies, and `.npz` files.
        splits: File of splits. `.npz` files require it, as do runs whose own file has moved.
        dataset: Spec string of the dataset of the `.npz` files.
        metrics: Metrics to compare. The runs must have computed them.
        structure: Metrics of the training embeddings, such as `spectral_decay`, to relate to the first
            metric (section 4.2).
        overrides: Settings for the structure, such as `device`. `geometry` also applies to `.npz` files;
            scores of runs are those of training.

    Returns:
        `methods`, by name: splits, distances, scores, their standard deviations over seeds (0 for one seed),
        AGS, `ags_spread` over seeds, and the difference from the mean over methods on the splits that all of
        them have. `ags_spread` has the number of seeds with runs on all splits, the standard deviation of
        their AGS, and `low` and `high`: Student's 95% interval of the mean, or the range for two seeds. It is
        empty for one seed. `structure`: slope and correlation per structure metric.
    """
    if not metrics:
        raise UnimetricError("`metrics` must name at least one metric", 'name metrics of the runs: `--metrics "recall(k=1)"`')
    folders = expand_studies([target for target in targets if not str(target).endswith(".npz")])
    features = [Path(target) for target in targets if str(target).endswith(".npz")]
    if structure and not folders:
        raise UnimetricError("`--structure` requires runs, and features without fine-tuning have no structure of training", "name runs")
    far: dict[str, float] = {}
    points = points_of_runs(folders, far, splits=splits, metrics=metrics, structure=structure, overrides=overrides)
    if features:
        if not splits or not dataset:
            raise UnimetricError("features without fine-tuning require splits and a dataset", "use `--splits FILE` and `--dataset`")
        far |= {number: distance for number, distance in distances(splits).items() if not number.startswith("key ")}
        table: Table = create("datasets", dataset)
        for path in features:
            name = str(path) if path.stem in points else path.stem
            points[name] = points_of_features(path, table, splits, list(metrics), geometry=overrides.get("geometry", ""))
    return summarize(points, far, list(metrics), list(structure))


def points_of_runs(
    folders: Sequence[Path],
    far: dict[str, float],
    *,
    splits: str,
    metrics: Sequence[str],
    structure: Sequence[str],
    overrides: dict[str, Any],
) -> Points:
    """Read the scores of finished runs, and evaluate the structure of their embeddings.

    The structure is that of the training embeddings.

    Args:
        folders: Run folders.
        far: Distance of each split, which is filled in.
        splits: File of splits that replaces the runs' own.
        metrics: Metrics that the runs have computed.
        structure: Metrics of the training embeddings.
        overrides: Settings for the structure.

    Raises:
        UnimetricError: A run is not finished, lacks a metric, or belongs to another file of splits.
    """
    configs = finished_configs(folders)
    warn_of_untrained(list(configs))
    labels = method_names(configs)
    points: Points = {}
    for folder, config in configs.items():
        number = split_number(config, folder, far, splits=splits)
        values = _scores(folder, metrics) | {"seed": float(config.seed)}
        if structure:
            found = evaluate(folder, metrics=list(structure), part="train", **overrides)
            _check_single("--structure", structure, found, "pi_ratio")
            values |= {f"structure/{text}": found[text] for text in structure}
        points.setdefault(labels[folder], {}).setdefault(number, []).append(values)
    return points


def points_of_features(path: Path, table: Table, splits: str, metrics: list[str], *, geometry: str) -> dict[str, list[dict[str, float]]]:
    """Compute metrics of features on the test classes of every split.

    Args:
        path: An `.npz` file of features of the whole dataset.
        table: Table of the dataset.
        splits: File of splits.
        metrics: Metric spec strings.
        geometry: Geometry of the features. Empty for the cosine.
    """
    features = torch.from_numpy(read_features(path, table))
    known = distances(splits)
    own_format = any(number.startswith("key ") for number in known)
    found = {}
    for number in (number for number in known if not number.startswith("key ")):
        text = f"{'ood' if own_format else 'published'}(path={splits!r}, split={number})"
        part, arguments = bind("splits", text, seed=0)
        rows = part(table, **(arguments if own_format else arguments | {"on_missing": "skip"})).test
        values = measure(space_of(features[torch.from_numpy(rows)], table, rows, geometry=geometry), metrics)
        _check_single("--metrics", metrics, values, "recall(k=1)")
        found[number] = [values]
    return found


def _check_single(option: str, metrics: Sequence[str], values: dict[str, float], example: str) -> None:
    """Raise an error if a metric returns several values."""
    for text in metrics:
        if text not in values:
            raise UnimetricError(f"`{option}` requires metrics with one value, but `{text}` has several", f"use one such as `{example}`")


def finished_configs(folders: Iterable[Path]) -> dict[Path, RunConfig]:
    """Return the settings of finished runs, without copies, which do not count as seeds."""
    first: dict[str, Path] = {}
    configs = {}
    for folder in folders:
        if not (folder / "done").is_file():
            raise UnimetricError(f"{folder}: not a finished run", "name folders of finished runs or of studies, and .npz files")
        config = load(folder / "config.toml")
        if first.setdefault(config.run_id, folder) == folder:
            configs[folder] = config
        else:
            logging.getLogger("unimetric").warning("%s: left out, the same run as %s", folder, first[config.run_id])
    return configs


def warn_of_untrained(folders: Sequence[Path]) -> None:
    """Log a warning if the best epoch of some runs is the untrained model.

    Methods that do not learn have equal values, and a figure of them looks like a result.
    """
    untrained = sum(read_done(folder)["epoch"] == 0 for folder in folders)
    if untrained:
        message = "%d of %d runs are best before training, so their values are those of the untrained model"
        logging.getLogger("unimetric").warning(message, untrained, len(folders))


def method_names(configs: dict[Path, RunConfig]) -> dict[Path, str]:
    """Name the method of each run by the settings that differ, except split and seed."""
    settings = {folder: asdict(config) for folder, config in configs.items()}
    same = NO_RESULT | {"split", "seed"}
    first = next(iter(settings.values()), {})
    differing = [key for key in first if key not in same and any(values[key] != first[key] for values in settings.values())]
    keys = differing or ["loss"]
    short = {folder: ", ".join(str(values[key]) for key in keys if values[key]) or "none" for folder, values in settings.items()}
    if len(set(short.values())) == len({tuple(values[key] for key in keys) for values in settings.values()}):
        return short
    return {folder: ", ".join(f"{key}={values[key]}" for key in keys) for folder, values in settings.items()}  # values are ambiguous


def split_number(config: RunConfig, folder: Path, far: dict[str, float], *, splits: str = "") -> str:
    """Return the number of a run's split, and record its distance.

    Args:
        config: Settings of the run.
        folder: Run folder, for errors.
        far: Distance of each split, which is filled in.
        splits: File of splits that replaces the run's own.

    Raises:
        UnimetricError: The split has no distance, or another one than in an earlier run.
    """
    found = place_of(config.split)
    if found is None:
        raise UnimetricError(f"{folder}: `split = {config.split!r}` has no distance", "train on splits of `ood(...)` or `published(...)`")
    file, number = splits or found[0], found[1]
    known = distances(file)
    if number not in known:
        raise UnimetricError(f"{file}: unknown split `{number}`", closest(number, known))
    if far.setdefault(number, known[number]) != known[number]:
        raise UnimetricError(
            f"{folder}: split {number} has a distance of {known[number]:.4g}, but {far[number]:.4g} in another run",
            "compare only runs of the same file of splits",
        )
    return number


def _scores(folder: Path, metrics: Sequence[str]) -> dict[str, float]:
    """Return the test scores of a run's best epoch."""
    line = read_done(folder)
    for metric in metrics:
        if f"test/{metric}" not in line:
            known = [key.removeprefix("test/") for key in line if key.startswith("test/")]
            raise UnimetricError(f"{folder}: the run has no value of `{metric}`", closest(metric, known))
    return {metric: line[f"test/{metric}"] for metric in metrics}


def summarize(points: Points, far: dict[str, float], metrics: list[str], structure: list[str]) -> dict[str, Any]:
    """Average the seeds of each method and compare the methods.

    Computes AGS, differences from the mean over methods, and trends of structure.

    Args:
        points: Metric values by method and split.
        far: Distance of each split.
        metrics: Compared metrics.
        structure: Metrics of the training embeddings.

    Returns:
        The report; see `shift_report`.
    """

    def grid(methods: Iterable[str], key: str) -> np.ndarray:
        return np.array([[_mean(points[method][number], key) for number in shared] for method in methods])

    shared = sorted(set.intersection(*(set(found) for found in points.values())), key=far.__getitem__)
    grids = {key: grid(points, key) for key in metrics}
    change = {key: values - values.mean(0) for key, values in grids.items()}
    methods: dict[str, Any] = {}
    for row, (method, found) in enumerate(points.items()):
        numbers = sorted(found, key=far.__getitem__)
        where = [far[number] for number in numbers]
        scores = {key: [_mean(found[number], key) for number in numbers] for key in metrics}
        methods[method] = {
            "splits": numbers,
            "distances": where,
            "runs": [len(found[number]) for number in numbers],
            "scores": scores,
            "deviations": {key: [_deviation(found[number], key) for number in numbers] for key in metrics},
            "ags": {key: ags(where, values) for key, values in scores.items()} if len(set(where)) > 1 else {},
            "ags_spread": {key: _ags_spread([found[number] for number in numbers], where, key) for key in metrics},
            "change": {key: dict(zip(shared, values[row].tolist(), strict=True)) for key, values in change.items()},
        }
    trained = [method for method, found in points.items() if _has_structure(found, structure)]
    trends = {key: structure_trend(grid(trained, f"structure/{key}"), grid(trained, metrics[0]))._asdict() for key in structure}
    return {"methods": methods, "structure": trends}


def _mean(seeds: list[dict[str, float]], key: str) -> float:
    """Return the mean of a metric over seeds."""
    return float(np.mean([values[key] for values in seeds]))


def _deviation(seeds: list[dict[str, float]], key: str) -> float:
    """Return the standard deviation of a metric over seeds, or 0 for one seed."""
    return float(np.std([values[key] for values in seeds], ddof=1)) if len(seeds) > 1 else 0.0


def _ags_spread(splits: Sequence[list[dict[str, float]]], where: Sequence[float], key: str) -> dict[str, float]:
    """Return number, standard deviation and interval of the AGS of single seeds.

    Only seeds with runs on all splits count.
    """
    by_seed = [{values["seed"]: values[key] for values in runs if "seed" in values} for runs in splits]
    complete = sorted(set.intersection(*(set(values) for values in by_seed)))
    if len(complete) < 2 or len(set(where)) < 2:
        return {}
    areas = [ags(where, [values[seed] for values in by_seed]) for seed in complete]
    low, high = min(areas), max(areas)
    deviation = float(np.std(areas, ddof=1))
    if len(areas) > 2:
        mean, half = t_interval(areas)
        low, high = mean - half, mean + half
    return {"seeds": len(areas), "deviation": deviation, "low": low, "high": high}


def _has_structure(found: dict[str, list[dict[str, float]]], structure: Sequence[str]) -> bool:
    """Return whether all values of a method include the structure of training."""
    lines = [line for seeds in found.values() for line in seeds]
    return all(f"structure/{key}" in line for line in lines for key in structure)


def draw_report(path: Path, report: dict[str, Any], metric: str) -> None:
    """Plot the score against the shift, one line per method.

    Below it is the difference from the mean over methods. Bars are standard deviations over seeds.

    Reference:
        Fig. 2 of Milbich et al. 2021.

    Args:
        path: PNG file to write.
        report: Result of `shift_report`.
        metric: One of its metrics.
    """
    several = len(report["methods"]) > 1
    with Canvas(path, width=7, height=6.5 if several else 4, rows=1 + several, columns=1) as axes:
        for name, method in report["methods"].items():
            spread = method["ags_spread"][metric]
            error = f" ± {100 * spread['deviation']:.1f}" if spread else ""
            area = f" (AGS {100 * method['ags'][metric]:.1f}{error})" if method["ags"] else ""
            bars = 100 * np.array(method["deviations"][metric])
            style: dict[str, Any] = {"fmt": "o-", "markersize": 4, "capsize": 3, "label": f"{name}{area}"}
            axes[0, 0].errorbar(method["distances"], 100 * np.array(method["scores"][metric]), bars, **style)
            shared = [place for place, number in enumerate(method["splits"]) if number in method["change"][metric]]
            if several and shared:
                change = [100 * method["change"][metric][method["splits"][place]] for place in shared]
                axes[1, 0].errorbar([method["distances"][place] for place in shared], change, bars[shared], **style)
        axes[0, 0].set(ylabel=f"{metric}, %")
        axes[0, 0].legend(frameon=False, fontsize="small")
        if several:
            axes[1, 0].axhline(0, color="grey", linewidth=0.8)
            axes[1, 0].set(ylabel="difference from the mean, points")
        axes[-1, 0].set(xlabel="Frechet distance, train to test")
