"""Figure of the shift between datasets, and of runs that are tested on other datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.shift import finished_configs, method_names
from unimetric.analysis.split import read_features
from unimetric.analysis.transfer import transfer
from unimetric.errors import UnimetricError
from unimetric.geometry.frechet import class_means, frechet_distance
from unimetric.images.table import Table
from unimetric.metrics import measure
from unimetric.runs.embed import space_of
from unimetric.runs.folder import expand_studies
from unimetric.spec import create


def domain_shift(
    targets: Sequence[str | Path], out: str | Path, *, datasets: Sequence[str], metric: str = "recall(k=1)", **overrides: Any
) -> dict[str, Any]:
    """Draw Frechet distances between datasets, and the scores of runs on other datasets.

    Each compares training classes with test classes. Distances are those of class means, as within a dataset.
    Lines mark the features themselves, which are not fine-tuned.

    Reference:
        Table 2 and figure 3 of the supplement of Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021).

    Args:
        targets: One `.npz` file of `unimetric split --features` per dataset, in the order of `datasets`, and
            run folders or folders of studies.
        out: PNG file.
        datasets: Dataset spec strings.
        metric: Metric with one value.
        overrides: Settings for the runs, such as `device`.

    Returns:
        `distances` (S, S) with one row per training set, `baseline` with the score of the features on each test set, and `scores` by
        method, training set and test set.
    """
    files = [Path(target) for target in targets if str(target).endswith(".npz")]
    folders = expand_studies([target for target in targets if not str(target).endswith(".npz")])
    if len(files) != len(datasets) or len(datasets) < 2:
        problem = f"the figure requires at least 2 datasets and one .npz file of features for each, got {len(datasets)} and {len(files)}"
        raise UnimetricError(problem, "name the files in the order of `--dataset`")
    configs = finished_configs(folders)
    for folder, config in configs.items():
        if config.dataset not in datasets:
            raise UnimetricError(f"{folder}: `dataset = {config.dataset!r}` is not among the datasets", "name it with `--dataset`")
    names = method_names({folder: replace(config, dataset="") for folder, config in configs.items()})
    distances, baseline = _compare(files, datasets, metric)
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in transfer(list(configs), datasets, metrics=[metric], **overrides) if configs else ():
        sides = scores.setdefault(names[Path(row["run"])], {}).setdefault(row["trained_on"], {})
        sides.setdefault(row["tested_on"], []).append(row[metric])
    means = {
        method: {source: {to: float(np.mean(seeds)) for to, seeds in sides.items()} for source, sides in found.items()}
        for method, found in scores.items()
    }
    _draw(out, list(datasets), distances, baseline, means, metric)
    return {"distances": distances.tolist(), "baseline": baseline, "scores": means}


def _compare(files: Sequence[Path], datasets: Sequence[str], metric: str) -> tuple[np.ndarray, list[float]]:
    """Return the distances of all training to all test sets, and the scores of the features."""
    means: list[list[torch.Tensor]] = []
    baseline = []
    for path, dataset in zip(files, datasets, strict=True):
        table: Table = create("datasets", dataset)
        features = torch.from_numpy(read_features(path, table))
        split = create("splits", "standard", table=table)
        sides = []
        for rows in (split.train, split.test):
            numbers = np.unique(table.labels[rows], return_inverse=True)[1]
            sides.append(class_means(features[rows].double(), torch.from_numpy(numbers), int(numbers.max()) + 1))
        means.append(sides)
        baseline.append(measure(space_of(features[split.test], table, split.test), [metric])[metric])
    if len({sides[0].shape[1] for sides in means}) > 1:
        raise UnimetricError("the files must have features of the same network", "compute them with the same `--backbone`")
    found = [[float(frechet_distance(train, test)) for _, test in means] for train, _ in means]
    return np.array(found), baseline


def _draw(
    out: str | Path,
    datasets: list[str],
    distances: np.ndarray,
    baseline: list[float],
    scores: dict[str, dict[str, dict[str, float]]],
    metric: str,
) -> None:
    """Draw the distances, and one panel of scores per test set."""
    columns = 1 + (len(datasets) if scores else 0)
    with Canvas(out, width=3.6 * columns, height=3.8, rows=1, columns=columns) as axes:
        first, *panels = axes[0]
        shown = first.imshow(distances, cmap="viridis")
        for row, column in np.ndindex(distances.shape):
            color = "black" if shown.norm(distances[row, column]) > 0.6 else "white"
            first.text(column, row, f"{distances[row, column]:.3g}", ha="center", va="center", color=color)
        first.set_xticks(range(len(datasets)), datasets, rotation=20, ha="right", fontsize=7)
        first.set_yticks(range(len(datasets)), datasets, fontsize=7)
        first.set(xlabel="test", ylabel="train", title="Frechet distance")
        for panel, to, value in zip(panels, datasets, baseline, strict=False):
            sources = [source for source in datasets if source != to]
            for number, (method, found) in enumerate(scores.items()):
                heights = [100 * found.get(source, {}).get(to, np.nan) for source in sources]
                places = np.arange(len(sources)) + 0.8 * (number - (len(scores) - 1) / 2) / len(scores)
                panel.bar(places, heights, 0.8 / len(scores), label=method)
            panel.axhline(100 * value, linestyle="--", color="black", linewidth=0.8, label="features, not fine-tuned")
            panel.set_xticks(range(len(sources)), sources, fontsize=7)
            panel.set(title=f"test: {to}", xlabel="train", ylabel=f"{metric}, %")
            panel.title.set_fontsize(8)
        if panels:
            panels[0].legend(loc="lower center", fontsize="x-small")
