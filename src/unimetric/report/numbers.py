"""Methods and their results: means, intervals, values of the papers, and shifts."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from unimetric.analysis.curves import ags, t_interval
from unimetric.config import NO_RESULT, RunConfig, split_metric
from unimetric.errors import UnimetricError
from unimetric.report.folders import Record
from unimetric.report.published import paper_distance
from unimetric.spec import declaration, parse

#: Settings that do not define a method: the execution of a run and its precision.
_EXECUTION = NO_RESULT | {"precision", "compile"}

_DEFAULTS = asdict(RunConfig())

#: Smallest number of seeds with a confidence interval. Below it, the report shows the range.
_SEEDS_FOR_INTERVAL = 3


@dataclass(frozen=True, eq=False)
class Method:
    """Runs with the same settings except for the seed.

    Args:
        name: Label, or the settings that differ from the other methods.
        runs: One run per seed.
    """

    name: str
    runs: list[Record]

    @property
    def task(self) -> tuple[str, str]:
        """Dataset and split. Methods are compared within one task."""
        return self.runs[0].dataset, self.runs[0].split

    def mean(self, metric: str) -> float:
        """Return the mean over the runs."""
        return float(np.mean([run.value(metric) for run in self.runs]))

    def half(self, metric: str) -> float:
        """Return half of Student's interval for the mean, or NaN for fewer than three runs."""
        values = [run.value(metric) for run in self.runs]
        return math.nan if len(values) < _SEEDS_FOR_INTERVAL else t_interval(values)[1]

    def range(self, metric: str) -> tuple[float, float]:
        """Return the lowest and the highest value of the runs."""
        values = [run.value(metric) for run in self.runs]
        return min(values), max(values)


def methods(records: list[Record]) -> list[Method]:
    """Group runs into methods.

    A method of a study is named by its labels. Others are named by the folder, if each is one run in a folder whose name was chosen,
    or by the settings that differ between them, as `key=value`.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[json.dumps(_method_settings(record), sort_keys=True)].append(record)
    every = list(groups.values())
    plain = [runs for runs in every if not _study_name(runs[0])]
    folders = {runs[0].folder.name for runs in plain} - {_study_name(runs[0]) for runs in every}
    chosen = all(len(runs) == 1 and runs[0].folder.name != runs[0].run_id for runs in plain)
    by_folder = chosen and len(folders) == len(plain)
    differ = _differing([runs[0] for runs in plain])
    found = []
    for runs in every:
        name = _study_name(runs[0])
        if not name and by_folder:
            name = runs[0].folder.name
        found.append(Method(name or _settings_name(runs[0], differ), runs))
    return _with_distinct_names(found)


def _with_distinct_names(found: list[Method]) -> list[Method]:
    """Add the settings that differ to the names of methods with one name, dataset and split.

    Two studies, or a study before and after a change of its file, may use one label for different settings.
    """
    same: dict[tuple[Any, str], list[Record]] = defaultdict(list)
    for method in found:
        same[method.task, method.name].append(method.runs[0])
    distinct = []
    for method in found:
        differ = _differing(same[method.task, method.name])
        distinct.append(replace(method, name=f"{method.name}, {_settings_name(method.runs[0], differ)}") if differ else method)
    return distinct


def _without_task(run: Record) -> str:
    """Return the settings of a method except for dataset and split, as a key."""
    return json.dumps({key: value for key, value in _method_settings(run).items() if key not in ("dataset", "split")}, sort_keys=True)


def _study_name(run: Record) -> str:
    return ", ".join(value for axis, value in run.labels.items() if axis not in ("seed", "dataset", "split"))


def _settings_name(run: Record, differ: list[str]) -> str:
    settings = _method_settings(run)
    return ", ".join(f"{key}={settings.get(key, '')}" for key in differ or ["loss"])


def _differing(runs: list[Record]) -> list[str]:
    """Return the settings that differ, without those that define a task."""
    values: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for key, value in _method_settings(run).items():
            values[key].add(json.dumps(value))
    return [key for key, found in values.items() if len(found) > 1 and key not in ("dataset", "split")]


def _method_settings(record: Record) -> dict[str, Any]:
    # A run that is older than a setting has the default of that setting.
    settings = _DEFAULTS | record.settings
    execution = _EXECUTION - record.labels.keys()  # a study of precisions compares them
    return {key: value for key, value in settings.items() if key != "seed" and key not in execution}


def raw_backbones(here: list[Method]) -> list[Method]:
    """Return the backbones of some methods before training, as methods.

    A method has one run per distinct result. Pretrained weights have one result. Random ones have one per
    seed. Runs with equal values of the metrics that they share have one result, with the metrics of all of them.

    Args:
        here: Methods on one dataset and split.
    """
    known: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for run in (run for method in here for run in method.runs if run.raw):
        some = known[str(run.settings.get("backbone", "")), str(run.settings.get("transform", ""))]
        # Seeds hold out other validation classes, so their values are no other result.
        raw = {key: value for key, value in run.raw.items() if not key.startswith("validation/")}
        lower = run.best.get("lower_is_better", [])
        same = next((each for each in some if _agree(each.best, raw)), None)
        if same is None:
            some.append(replace(run, best=raw | {"lower_is_better": lower}))
        else:
            same.best.update(raw, lower_is_better=[*same.best["lower_is_better"], *lower])
    backbones = [backbone for backbone, _ in known]
    found = []
    for (backbone, transform), runs in known.items():
        name = "raw backbone" if len(known) == 1 else f"raw {backbone}"
        if backbones.count(backbone) > 1:
            name += f", {transform}"
        found.append(Method(name, runs))
    return found


def _agree(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two results have the same value of every metric that both have."""
    return all(json.dumps(first[key]) == json.dumps(second[key]) for key in first.keys() & second.keys())


def measured(found: list[Method]) -> list[str]:
    """Return every metric of the runs, in the order of the files.

    Metrics of the test classes come first. Those of the training images are written as `train: METRIC`.
    Singular values are not among them, because they are drawn as curves.
    """
    names: dict[str, None] = {}
    for part, prefix in (("test/", ""), ("train/", "train: ")):
        for method in found:
            for run in method.runs:
                names |= dict.fromkeys(prefix + key.removeprefix(part) for key in run.best if key.startswith(part))
    return [name for name in names if not SINGULAR_VALUES.search(name)]


#: Key of one of the values of `singular_values` or `class_spectra`, with the metric and the number of the singular value.
SINGULAR_VALUES = re.compile(r"\b((?:singular_values|class_spectra)(?:\(.*?\))?)/(\d+)$")


def at_own_epochs(record: Record) -> Record:
    """Replace each metric by its value at its own best epoch on the test classes.

    Structure metrics keep the run's best epoch. Roth et al. 2020 report this way. It selects epochs on test classes, so values are
    higher than with one epoch for all metrics.
    """
    best = dict(record.best)
    for line in record.lines:
        if line["epoch"]:  # epoch 0 is the model before training
            for key, value in line.items():
                metric = key.removeprefix("test/")
                if key.startswith("test/") and not is_structure(metric) and math.isfinite(value):
                    best[key] = (min if record.prefers_less(metric) else max)(value, best.get(key, value))
    return replace(record, best=best)


def direction(found: list[Method], metric: str) -> int:
    """Return 1 if a higher value of a metric is better, -1 if a lower one is."""
    return -1 if any(run.prefers_less(metric) for method in found for run in method.runs) else 1


def is_structure(metric: str) -> bool:
    """Return whether a metric declares that neither higher nor lower is better.

    The declaration is read from the source of the metric, without importing it. A metric that is computed by another one, such as
    `per_source(metric=...)`, is classified like that one.

    Args:
        metric: Spec string, or key of a result, such as `per_source(metric='pi_ratio')/cub200`.

    >>> is_structure("spectral_decay"), is_structure("recall(k=1)"), is_structure("per_source(metric='pi_ratio')/cub200")
    (True, False, True)
    """
    metric = split_metric(metric)[1]
    found = re.match(r"[\w.]+(\(.*?\))?(?=/|$)", metric)
    try:
        call = parse(found[0] if found else metric)
        inner = call.named.get("metric")
        if isinstance(inner, str):
            return is_structure(inner)
        return "." not in call.name and declaration("metrics", call.name).members.get("better") == "neither"
    except UnimetricError:
        return False


def judges(metrics: list[str]) -> list[str]:
    """Return the metrics of the test classes for which higher or lower is better."""
    return [metric for metric in metrics if split_metric(metric)[0] == "test" and not is_structure(metric)]


def format_value(metric: str, value: float) -> str:
    """Format a metric value for a table.

    Structure metrics are plain numbers, others are percentages.

    >>> format_value("spectral_decay", 11.0274), format_value("recall(k=1)", 0.6309)
    ('11.027', '63.09')
    """
    if math.isnan(value):
        return ""
    return f"{value:.3f}" if is_structure(metric) else f"{100 * value:.2f}"


# --- shifts and structure -------------------------------------------------------------------------------------------


def shift_of(run: Record) -> float:
    """Return the Frechet distance of a run's test and training classes, or NaN.

    The distance comes from the file of splits, or from the paper.
    """
    if not math.isnan(run.shift):
        return run.shift
    return paper_distance(run.dataset.partition("(")[0], _published_number(run))


def _published_number(run: Record) -> int:
    """Return the number of a run's split in the files of ooDML, or 0."""
    # The splits of `ood` are not those of the paper.
    number = re.match(r"published\(.*?\bsplit\s*=\s*(\d+)", run.split, re.DOTALL)
    return int(number[1]) if number else 0


def shifts(found: list[Method], metric: str) -> list[dict[str, Any]]:
    """Return shifts, means and AGS of each method with results at several shifts."""
    rows: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    names: dict[tuple[str, str], str] = {}
    # A curve has the runs of several folders, so none of them names it.
    differ = _differing([method.runs[0] for method in found if not _study_name(method.runs[0])])
    for method in found:
        # Group by settings, because two studies may use one name for different methods.
        place = method.task[0], _without_task(method.runs[0])
        names.setdefault(place, _study_name(method.runs[0]) or _settings_name(method.runs[0], differ))
        for run in method.runs:
            shift = shift_of(run)
            if not math.isnan(shift) and not math.isnan(run.value(metric)):
                rows[place][shift].append(run.value(metric))
    curves = []
    for place, points in rows.items():
        dataset, name = place[0], names[place]
        if len(points) > 1:
            x = sorted(points)
            y = [float(np.mean(points[shift])) for shift in x]
            curves.append({"dataset": dataset, "name": name, "x": x, "y": y, "ags": ags(x, y)})
    return curves


def correlations(found: list[Method], metrics: list[str]) -> list[dict[str, Any]]:
    """Return Pearson's r of every structure metric with every other one, per dataset.

    This is figure 5 of Roth et al. 2020. With several splits, all values are scaled to the range from 0 to 1
    within each split, as in Milbich et al. 2021, figure 4. `trends` then has slope and intercept of the
    least-squares line over all points, and over those of the default split.
    """
    rows = []
    for dataset in dict.fromkeys(method.task[0] for method in found):
        here = [method for method in found if method.task[0] == dataset]
        for structure in filter(is_structure, metrics):
            for judge in judges(metrics):
                row = _correlation(here, structure, judge)
                if row:
                    rows.append({"dataset": dataset, "x": structure, "y": judge} | row)
    return rows


def _correlation(here: list[Method], structure: str, judge: str) -> dict[str, Any] | None:
    """Return r, points, splits and trends of two metrics on one dataset.

    Returns None if there is no correlation.
    """
    runs = [(method.name, method.task[1], run) for method in here for run in method.runs]
    runs = [each for each in runs if math.isfinite(each[2].value(structure)) and math.isfinite(each[2].value(judge))]
    values = np.array([(run.value(structure), run.value(judge)) for _, _, run in runs]).reshape(-1, 2)
    splits = [split for _, split, _ in runs]
    several = len(set(splits)) > 1
    if several:
        values = _scaled(values, splits)
    inside = np.isfinite(values).all(1)
    x, y = values[inside].T
    if len(x) < 3 or not x.std() > 0 or not y.std() > 0:
        return None
    runs = [run for run, good in zip(runs, inside, strict=True) if good]
    default = np.array([is_default_split(run) for _, _, run in runs])
    trends = {"overall": _trend(x, y), "default": _trend(x[default], y[default])} if several else {}
    return {
        "r": float(np.corrcoef(x, y)[0, 1]),
        "points": [(float(a), float(b), name) for a, b, (name, _, _) in zip(x, y, runs, strict=True)],
        "splits": [split for _, split, _ in runs],
        "trends": {name: line for name, line in trends.items() if line},
    }


def _scaled(values: np.ndarray, splits: list[str]) -> np.ndarray:
    """Scale each column to the range from 0 to 1 within each split.

    NaN in splits in which a column is constant.
    """
    scaled = np.full_like(values, np.nan)
    for split in dict.fromkeys(splits):
        mine = np.array([each == split for each in splits])
        low, high = values[mine].min(0), values[mine].max(0)
        if (high > low).all():
            scaled[mine] = (values[mine] - low) / (high - low)
    return scaled


def _trend(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Return slope and intercept of the least-squares line, or None if there is none."""
    if len(x) < 2 or not x.std() > 0:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


#: Number of the default split in the files of ooDML.
_DEFAULT_SPLITS = {"cub200": 3, "cars196": 1, "sop": 1}


def is_default_split(run: Record) -> bool:
    """Return whether a run has the default split of its dataset."""
    if "default" in run.gallery:
        return bool(run.gallery["default"])
    number = _published_number(run)
    if number:
        return _DEFAULT_SPLITS.get(run.dataset.partition("(")[0]) == number
    return run.split.startswith("standard")
