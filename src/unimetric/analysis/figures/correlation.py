"""Figure of the correlation of metrics over runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.figures._runs import judging_metrics, read_finished
from unimetric.errors import UnimetricError


def metric_correlation(runs: Sequence[str | Path], out: str | Path, *, metrics: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Draw Pearson's correlation of every metric with every other one.

    Each is computed over the runs on one dataset and split.

    Reference:
        Figure 4 of Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020).

    Args:
        runs: Folder of a study, or finished run folders.
        out: PNG file.
        metrics: Metrics of the runs. Defaults to all for which higher or lower is better.

    Returns:
        One matrix per dataset and split. An entry is NaN if a metric has the same value in all runs.
    """
    found = read_finished(runs)
    names = judging_metrics(found, metrics)
    if len(names) < 2:
        raise UnimetricError(f"a correlation requires at least 2 metrics, got {', '.join(names) or 'none'}", "name metrics of the runs")
    matrices = {}
    for task in dict.fromkeys(run.task for run in found):
        values = np.array([[run.values[name] for name in names] for run in found if run.task == task])
        if len(values) < 3:
            raise UnimetricError(f"{', '.join(task)}: a correlation requires at least 3 runs, got {len(values)}", "name more runs")
        with np.errstate(invalid="ignore", divide="ignore"):
            matrices[", ".join(task)] = np.corrcoef(values.T)
    size = 1.5 + 0.6 * len(names)
    with Canvas(out, width=size * len(matrices) + 0.8, height=size, rows=1, columns=len(matrices)) as axes:
        for axis, (title, matrix) in zip(axes[0], matrices.items(), strict=True):
            shown = axis.imshow(matrix, cmap="viridis", vmax=1)
            for row, column in np.ndindex(matrix.shape):
                color = "black" if shown.norm(matrix[row, column]) > 0.6 else "white"
                axis.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=7, color=color)
            axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
            axis.set_yticks(range(len(names)), names, fontsize=7)
            axis.set_title(title, fontsize=8)
            axis.figure.colorbar(shown, ax=axis, shrink=0.7)
    return matrices
