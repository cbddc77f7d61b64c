"""Figure of recall by the keep probability of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError, closest
from unimetric.runs.folder import expand_studies, load_settings, read_done
from unimetric.spec import complete_arguments


def keep_probability(runs: Sequence[str | Path], out: str | Path, *, metrics: Sequence[str] = ()) -> dict[float, dict[str, float]]:
    """Draw metric values by the probability that an adapter is active in training.

    Reference:
        Fig. 7 of PUMA (Kim et al. 2023).

    Args:
        runs: Folder of a study, or finished run folders, with different values of the adapter's `keep`.
        out: PNG file.
        metrics: Metrics of the best epoch. Defaults to those that all runs have.

    Returns:
        Metric values by keep probability.
    """
    found: dict[float, dict[str, float]] = {}
    for run in expand_studies(runs):
        config = load_settings(run)
        if not config.adapter or not (Path(run) / "done").is_file():
            raise UnimetricError(f"{run}: not a finished run with an adapter", "name runs of `stochastic_adapter`, `puma` or `lora`")
        keep = complete_arguments("adapters", config.adapter).get("keep")
        if keep is None:
            raise UnimetricError(f"{run}: `{config.adapter}` has no `keep`", "name runs of `stochastic_adapter`, `puma` or `lora`")
        line = read_done(Path(run))
        numbers = {key.removeprefix("test/"): value for key, value in line.items() if key.startswith("test/")}
        if keep in found:
            raise UnimetricError(f"{run}: another run also has `keep={keep}`", "name one run per probability")
        found[keep] = numbers
        for key in metrics:
            if key not in numbers:
                raise UnimetricError(f"{run}: the run has no value of `{key}`", closest(key, numbers))
    found = dict(sorted(found.items()))
    shown = list(metrics) or [key for key in next(iter(found.values()), {}) if all(key in each for each in found.values())]
    with Canvas(out, width=5, height=3.5) as axes:
        for key in shown:
            axes.plot(list(found), [each[key] for each in found.values()], marker="o", label=key)
        axes.set_xlabel("keep probability")
        axes.set_ylabel("score")
        axes.legend(fontsize=7)
    return found
