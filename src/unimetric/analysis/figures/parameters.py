"""Figure of accuracy by the number of trained parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.figures._runs import FinishedRun, check_same_method, judging_metrics, read_finished
from unimetric.metrics.harmonic import harmonic_mean
from unimetric.runs.folder import open_run


def trained_parameters(runs: Sequence[str | Path], out: str | Path, *, metric: str = "") -> dict[str, tuple[float, float]]:
    """Draw the score of each method by the number of its trained parameters.

    The runs of one method on several datasets count as one set of models, one per dataset: their parameters are added, and the score is
    the harmonic mean.

    Reference:
        Fig. 2 of PUMA (Kim et al. 2023).

    Args:
        runs: Folder of a study, or finished run folders.
        out: PNG file.
        metric: Metric of the runs. Defaults to the first that all have and for which higher or lower is better.

    Returns:
        By method: the number of trained parameters, and the score. Seeds are averaged.

    Raises:
        UnimetricError: Runs of one method and dataset differ in more than the seed.
    """
    found = read_finished(runs, without=["dataset"])
    name = judging_metrics(found, [metric] if metric else [])[0]
    points = {}
    for method in dict.fromkeys(run.name() for run in found):
        datasets: dict[str, list[float]] = {}
        first: dict[str, FinishedRun] = {}
        sizes: dict[str, int] = {}
        for run in found:
            if run.name() == method:
                check_same_method(run, first.setdefault(run.config.dataset, run))
                datasets.setdefault(run.config.dataset, []).append(run.values[name])
                if run.config.dataset not in sizes:
                    _, model = open_run(run.folder)
                    sizes[run.config.dataset] = sum(each.numel() for each in model.parameters() if each.requires_grad)
        points[method] = (float(sum(sizes.values())), harmonic_mean(float(np.mean(seeds)) for seeds in datasets.values()))
    with Canvas(out, width=5.5, height=4) as axes:
        for method, (size, score) in points.items():
            axes.scatter(size, 100 * score, s=40)
            axes.annotate(method, (size, 100 * score), textcoords="offset points", xytext=(6, 4), fontsize=8)
        axes.set_xscale("log")
        axes.margins(x=0.4, y=0.15)
        axes.set(xlabel="trained parameters", ylabel=f"{name}, %")
    return points
