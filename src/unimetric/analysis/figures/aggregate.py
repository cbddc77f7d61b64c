"""Figure of one axis of a study, over all methods and metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.figures._runs import FinishedRun, check_same_method, judging_metrics, read_finished
from unimetric.config import NO_RESULT
from unimetric.errors import UnimetricError, closest

#: Factor -> value -> method -> relative scores of all metrics, datasets and splits.
Scores = dict[str, dict[str, dict[str, list[float]]]]


def aggregate(runs: Sequence[str | Path], out: str | Path, *, by: str, metrics: Sequence[str] = ()) -> Scores:
    """Draw relative scores by one axis of a study.

    Panels show the mean of each method, and the distribution over methods and metrics.

        score = value / largest value over the axis,   of each method, metric, dataset and split

    Seeds are averaged first. If lower values of a metric are better, the score is the smallest value / value. If the axis has tables
    with lists, such as `batch_size = [28, 56]`, each of these tables is a factor with its own row.

    Reference:
        Figures 2 and 3 of Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020).

    Args:
        runs: Folder of a study, or finished run folders.
        out: PNG file.
        by: Axis of the study, such as `sampler`.
        metrics: Metrics of the runs. Defaults to all for which higher or lower is better.

    Returns:
        Scores by factor, value and method.
    """
    found = read_finished(runs)
    axes = sorted({axis for run in found for axis in run.labels if axis != "seed"})
    if by not in axes:
        raise UnimetricError(f"`--by` must be an axis of the study ({', '.join(axes)}), got `{by}`", closest(by, axes))
    names = judging_metrics(found, metrics)
    scores = {factor: relative_scores(points, metrics=names) for factor, points in find_factors(found, by=by).items()}
    with Canvas(out, width=10, height=3.6 * len(scores), rows=len(scores), columns=2) as rows:
        for (lines, violins), (factor, values) in zip(rows, scores.items(), strict=True):
            places = range(len(values))
            for method in dict.fromkeys(method for each in values.values() for method in each):
                means = [np.mean(each.get(method, [np.nan])) for each in values.values()]
                lines.plot(places, means, "o-", markersize=4, label=method)
            lines.set_ylabel("mean relative score")
            lines.legend(frameon=False, fontsize="x-small")
            violins.violinplot([list(chain.from_iterable(each.values())) for each in values.values()], places, showmeans=True)
            violins.set_ylabel("relative scores of all\nmethods and metrics")
            for axis in (lines, violins):
                axis.set_xticks(places, list(values), rotation=20, ha="right", fontsize="small")
                axis.set_xlabel(factor)
    return scores


class Point(NamedTuple):
    """A run as a value of a factor.

    Args:
        value: Label of the value.
        method: Name of the method, without the factor.
        run: The run.
    """

    value: str
    method: str
    run: FinishedRun


def find_factors(runs: Sequence[FinishedRun], *, by: str) -> dict[str, list[Point]]:
    """Group the runs of a study by the factors of an axis.

    Tables of the axis without lists are one factor. A grid lists equal runs once, so the run with the default settings has the label of
    one factor. It is added to every factor whose list has its value.

    Args:
        runs: Finished runs.
        by: Axis of their study.
    """
    shared = set.intersection(*(set(run.labels) for run in runs)) | {by, "seed"}
    inner = {axis for run in runs for axis in run.labels} - shared
    factors: dict[str, list[Point]] = defaultdict(list)
    keys: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        if by not in run.labels:
            continue
        own = [axis for axis in run.labels if axis in inner]
        factor = run.labels[by] if own else by
        value = ", ".join(run.labels[axis] for axis in own or [by])
        factors[factor].append(Point(value, run.name({by, *inner}), run))
        keys[factor].update(own)
    for factor, points in factors.items():
        if len(keys[factor]) == 1:
            key = next(iter(keys[factor]))
            known = {_settings_without(point.run, key) for point in points}
            others = [point.run for name, some in factors.items() if name != factor for point in some]
            same = [run for run in others if _settings_without(run, key) in known]
            points[:0] = [Point(str(getattr(run.config, key)), run.name({by, *inner}), run) for run in same]
    return dict(factors)


def _settings_without(run: FinishedRun, key: str) -> str:
    """Return all settings except one, as text."""
    return repr({name: value for name, value in asdict(run.config).items() if name != key and name not in NO_RESULT})


def relative_scores(points: Sequence[Point], *, metrics: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Average the seeds, and divide by the best value of the factor.

    Args:
        points: Runs of one factor.
        metrics: Metrics of the runs.

    Returns:
        Scores by value and method.

    Raises:
        UnimetricError: Runs of one value, method, dataset and split differ in more than the seed.
    """
    groups: dict[tuple[str, tuple[str, str], str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    first: dict[tuple[str, str, tuple[str, str]], FinishedRun] = {}
    for value, method, run in points:
        check_same_method(run, first.setdefault((value, method, run.task), run))
        for metric in metrics:
            groups[method, run.task, metric][value].append(run.values[metric])
    lower = {metric for point in points for metric in point.run.lower}
    scores: dict[str, dict[str, list[float]]] = {value: {} for value, _, _ in points}
    for (method, _, metric), values in groups.items():
        means = {value: float(np.mean(seeds)) for value, seeds in values.items()}
        best = min(means.values()) if metric in lower else max(means.values())
        for value, mean in means.items():
            score = _divide(best, mean) if metric in lower else _divide(mean, best)
            scores[value].setdefault(method, []).append(score)
    return scores


def _divide(value: float, best: float) -> float:
    return value / best if best else 0.0
