"""Figure of recall by the number of training images per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.figures._runs import average_seeds, judging_metrics, read_finished
from unimetric.errors import UnimetricError
from unimetric.spec import complete_arguments


def few_shot_curves(runs: Sequence[str | Path], out: str | Path, *, metrics: Sequence[str] = ()) -> dict[str, dict[str, dict[int, float]]]:
    """Draw metrics by the number of training images per class.

    The figure has one panel per metric and one line per method.

    Reference:
        Fig. 6 of PUMA (Kim et al. 2023).

    Args:
        runs: Folder of a study, or finished run folders, with the split `few_shot`.
        out: PNG file.
        metrics: Metrics of the runs. Defaults to all for which higher or lower is better.

    Returns:
        By metric, method and number of images: the mean over seeds.
    """
    found = read_finished(runs)
    curves = []
    for run in found:
        arguments = complete_arguments("splits", run.config.split, seed=0)
        if "shots" not in arguments:
            raise UnimetricError(f"{run.folder}: `split = {run.config.split!r}` has no `shots`", "name runs of `few_shot(shots=...)`")
        curves.append((run, run.name({"shots"}), int(arguments["shots"])))
    means = average_seeds(curves, judging_metrics(found, metrics))
    columns = min(4, len(means))
    rows = -(-len(means) // columns)
    with Canvas(out, width=3 * columns, height=2.7 * rows, rows=rows, columns=columns) as axes:
        for axis, (name, methods) in zip(axes.flat, means.items(), strict=False):
            for method, points in methods.items():
                axis.plot(list(points), [100 * value for value in points.values()], "o-", markersize=4, label=method)
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(points), [str(count) for count in points])
            axis.set_title(name, fontsize=8)
        for axis in axes.flat[len(means) :]:
            axis.set_visible(False)
        axes[-1, 0].set(xlabel="images per class", ylabel="score, %")
        axes[0, 0].legend(frameon=False, fontsize="x-small")
    return means
