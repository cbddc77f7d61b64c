"""Few-shot adaptation of the runs of a study over growing shift: `unimetric adapt STUDY`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unimetric.analysis.adapt import METRICS, adapt, default_iterations
from unimetric.analysis.canvas import Canvas
from unimetric.analysis.shift import Points, finished_configs, method_names, split_number, summarize
from unimetric.errors import UnimetricError
from unimetric.runs.folder import load_settings, overridden
from unimetric.spec import signature

_DEFAULTS = {key: each.default for key, each in signature(adapt).parameters.items()}

#: Settings of a stored result that must be the wanted ones.
_COMPARED = ("iterations", "lr", "looks", "draw", "drawn", "epoch", "with_replacement", "seed", "run_id")


def adapt_study(
    runs: Sequence[Path],
    *,
    shots: Sequence[int] = (2, 5),
    metrics: Sequence[str] = METRICS,
    splits: str = "",
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Adapt all runs of a study to a few images per test class, and compare methods.

    Methods are compared over the shift of the splits. Runs that differ only in split and seed are one method,
    and its seeds are averaged. A result that is already in a run folder, with the same settings, is read
    instead of computed.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021), section 4.4, figure 7 and figure 8 of the supplement.

    Args:
        runs: Folders of finished runs, trained on splits of one file.
        shots: Numbers of support images per class.
        metrics: Metric spec strings.
        splits: File of splits that replaces the runs' own.
        progress: Callback with (finished adaptations, all adaptations).
        settings: Arguments of `adapt`, and settings that may differ from training.

    Returns:
        By number of shots, then by method: splits, distances, scores and AGS of `zero/METRIC`,
        `few/METRIC` and `gain/METRIC`, as in `shift_report`.
    """
    if not runs or not shots:
        raise UnimetricError(
            "a few-shot study requires at least one finished run and one number of shots", "name a folder of finished runs"
        )
    configs = finished_configs(runs)
    names = method_names(configs)
    far: dict[str, float] = {}
    numbers = {folder: split_number(config, folder, far, splits=splits) for folder, config in configs.items()}
    keys = [f"{part}/{metric}" for part in ("zero", "few", "gain") for metric in metrics]
    report: dict[str, Any] = {}
    done = 0
    for count in shots:
        points: Points = {}
        for folder in configs:
            result = _stored(folder, count, keys, settings) or adapt(folder, shots=count, metrics=metrics, **settings)
            values = {key: mean for key, (mean, _) in result["summary"].items()} | {"seed": float(configs[folder].seed)}
            points.setdefault(names[folder], {}).setdefault(numbers[folder], []).append(values)
            done += 1
            if progress is not None:
                progress(done, len(shots) * len(configs))
        report[str(count)] = summarize(points, far, keys, [])["methods"]
    return report


def _stored(folder: Path, shots: int, keys: Sequence[str], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of an earlier adaptation with these settings, or None."""
    path = folder / f"adapt_{shots}_shots.json"
    if not path.exists():
        return None
    overrides = {key: value for key, value in settings.items() if key not in _DEFAULTS}
    wanted = _DEFAULTS | settings | {"run_id": overridden(load_settings(folder), overrides, folder).run_id}
    wanted |= {"iterations": wanted["iterations"] or default_iterations(shots), "drawn": wanted["episodes"]}
    try:
        found = json.loads(path.read_text())
        same = all(found[key] == wanted[key] for key in _COMPARED)
        return found if same and all(key in found["summary"] for key in keys) else None
    except (ValueError, KeyError, TypeError):
        return None  # damaged or of another version: computed again


def draw_few_shot(path: Path, methods: dict[str, Any], metric: str) -> None:
    """Plot a score against the shift, before (dashed) and after adaptation.

    As in Milbich et al. 2021, figure 7.

    Args:
        path: PNG file to write.
        methods: Result of `adapt_study` for one number of shots.
        metric: One of its metrics.
    """
    with Canvas(path, width=7, height=4) as axes:
        for number, (name, method) in enumerate(methods.items()):
            for part, style in (("few", "o-"), ("zero", "o--")):
                scores = [100 * score for score in method["scores"][f"{part}/{metric}"]]
                label = name if part == "few" else None
                axes.plot(method["distances"], scores, style, markersize=4, color=f"C{number}", label=label)
        axes.set(xlabel="Frechet distance, train to test", ylabel=f"{metric}, % (dashed: zero-shot)")
        axes.legend(frameon=False, fontsize="small")
