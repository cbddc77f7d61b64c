"""Figure of recall by the sizes of adapters and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.figures._runs import average_seeds, judging_metrics, read_finished
from unimetric.errors import UnimetricError
from unimetric.spec import complete_arguments


def component_sizes(runs: Sequence[str | Path], out: str | Path, *, metrics: Sequence[str] = ()) -> dict[str, dict[int, dict[int, float]]]:
    """Draw metrics by adapter rank, one panel per metric and one line per prompt length.

    A run whose adapter has no rank has rank 0, and one without prompts has length 0. With both, only the head is trained.

    Reference:
        Fig. 8 of PUMA (Kim et al. 2023).

    Args:
        runs: Folder of a study, or finished run folders.
        out: PNG file.
        metrics: Metrics of the runs. Defaults to all for which higher or lower is better.

    Returns:
        By metric, prompt length and rank: the mean over seeds.
    """
    found = read_finished(runs)
    points = []
    for run in found:
        if not run.config.adapter:
            raise UnimetricError(f"{run.folder}: the run has no adapter", "name runs of `puma`, `stochastic_adapter` or `linear_probe`")
        arguments = complete_arguments("adapters", run.config.adapter)
        points.append((run, int(arguments.get("length", 0)), int(arguments.get("rank", 0))))
    means = average_seeds(sorted(points, key=lambda point: point[1]), judging_metrics(found, metrics))
    with Canvas(out, width=3.4 * len(means), height=3.2, rows=1, columns=len(means)) as axes:
        for axis, (name, lengths) in zip(axes[0], means.items(), strict=True):
            ticks = sorted({rank for ranks in lengths.values() for rank in ranks})
            for length, ranks in lengths.items():
                places = [ticks.index(rank) for rank in ranks]
                axis.plot(places, [100 * value for value in ranks.values()], "o-", markersize=4, label=f"prompt length {length}")
            axis.set_xticks(range(len(ticks)), [str(rank) for rank in ticks])
            axis.set_title(name, fontsize=8)
            axis.set(xlabel="rank of the adapters", ylabel="score, %")
        axes[0, 0].legend(frameon=False, fontsize="x-small")
    return means
