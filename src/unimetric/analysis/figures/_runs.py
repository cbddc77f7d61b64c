"""Finished runs of studies, with their labels and metric values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from unimetric.analysis.shift import finished_configs, method_names, warn_of_untrained
from unimetric.config import RunConfig, better
from unimetric.errors import UnimetricError, closest
from unimetric.runs.folder import expand_studies, read_done
from unimetric.spec import parse

Line = TypeVar("Line", int, str)


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run.

    Args:
        folder: Run folder.
        config: Settings.
        labels: Labels in its study, by axis. Without a study, `method` has the settings that differ.
        values: Test metrics of the best epoch.
        lower: Metrics whose lower values are better.
    """

    folder: Path
    config: RunConfig
    labels: dict[str, str]
    values: dict[str, float]
    lower: frozenset[str]

    @property
    def task(self) -> tuple[str, str]:
        """Dataset and split."""
        return self.config.dataset, self.config.split

    def name(self, without: Iterable[str] = ()) -> str:
        """Return the labels that name its method.

        These are all labels except those of the seed, the dataset and the split.

        Args:
            without: Further axes to exclude.
        """
        left_out = {"seed", "dataset", "split", *without}
        return ", ".join(label for axis, label in self.labels.items() if axis not in left_out) or "all"


def read_finished(places: Sequence[str | Path], *, without: Iterable[str] = ()) -> list[FinishedRun]:
    """Read finished runs, and those in the folders of studies.

    Logs a warning if the best epoch of some runs is the untrained model.

    Args:
        places: Run folders, and folders of studies.
        without: Settings that do not name the method of runs without a study.

    Raises:
        UnimetricError: A folder has no finished run.
    """
    configs = finished_configs(expand_studies(places))
    folders = list(configs)
    studies = {parent: read_labels(parent / "study.json") for parent in dict.fromkeys(folder.resolve().parent for folder in folders)}
    runs = []
    for parent, labels in studies.items():
        order = {run_id: number for number, run_id in enumerate(labels)}
        here = [folder for folder in folders if folder.resolve().parent == parent]
        for folder in sorted(here, key=lambda folder: order.get(configs[folder].run_id, len(order))):
            line = read_done(folder)
            values = {key.removeprefix("test/"): float(value) for key, value in line.items() if key.startswith("test/")}
            lower = frozenset(line.get("lower_is_better", ()))
            runs.append(FinishedRun(folder, configs[folder], labels.get(configs[folder].run_id, {}), values, lower))
    warn_of_untrained(folders)
    if any(not run.labels for run in runs):  # not all are of a study
        unset: dict[str, Any] = dict.fromkeys(without, "")
        names = method_names({folder: replace(config, **unset) for folder, config in configs.items()})
        runs = [replace(run, labels={"method": names[run.folder], "seed": str(run.config.seed)}) for run in runs]
    return runs


def read_labels(path: Path) -> dict[str, dict[str, str]]:
    """Return the labels of each run of a study, in the order of its grid.

    Empty without a study.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {run_id: {str(axis): str(label) for axis, label in labels.items()} for run_id, labels in found.items()}
    except (ValueError, AttributeError):
        raise UnimetricError(f"{path}: must contain the labels of each run", "run `unimetric bench` again, which writes the file") from None


def check_same_method(run: FinishedRun, other: FinishedRun) -> None:
    """Raise an error if two runs, whose values are averaged, differ in more than the seed."""
    if key := run.config.first_difference(other.config, "seed"):
        mine, theirs = getattr(run.config, key), getattr(other.config, key)
        raise UnimetricError(
            f"{run.folder}: would be averaged with {other.folder}, but has `{key} = {mine!r}` instead of {theirs!r}",
            f"name runs with one `{key}`",
        )


def average_seeds(points: Iterable[tuple[FinishedRun, Line, int]], metrics: Sequence[str]) -> dict[str, dict[Line, dict[int, float]]]:
    """Return the mean over seeds by metric, line and position, with ascending positions.

    Args:
        points: Runs, each with its line and its position on the axis.
        metrics: Metrics of the runs.

    Raises:
        UnimetricError: Runs of one line and position differ in more than the seed.
    """
    groups: dict[Line, dict[int, list[FinishedRun]]] = {}
    for run, line, position in points:
        same = groups.setdefault(line, {}).setdefault(position, [])
        same.append(run)
        check_same_method(run, same[0])
    return {
        metric: {
            line: {position: float(np.mean([run.values[metric] for run in runs])) for position, runs in sorted(positions.items())}
            for line, positions in groups.items()
        }
        for metric in metrics
    }


def judging_metrics(runs: Sequence[FinishedRun], wanted: Sequence[str] = ()) -> list[str]:
    """Return the metrics that all runs have and for which higher or lower is better.

    Args:
        runs: Finished runs.
        wanted: Metrics to use instead, which all runs must have.
    """
    for metric in wanted:
        for run in runs:
            if metric not in run.values:
                raise UnimetricError(f"{run.folder}: the run has no value of `{metric}`", closest(metric, run.values))
    if wanted:
        return list(wanted)
    return [metric for metric in runs[0].values if _judges(metric) and all(metric in run.values for run in runs)]


def _judges(key: str) -> bool:
    """Return whether higher or lower values of a metric are better.

    A metric with an inner metric is judged by that one.
    """
    end = key.rfind(")") + 1
    text = key[:end] if end else key.partition("/")[0]
    return "." in parse(text).name or better(text) != "neither"
