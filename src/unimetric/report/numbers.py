"""Methods and their results: means, intervals, values of the papers, and shifts."""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from unimetric.analysis.curves import ags
from unimetric.config import NO_RESULT, RunConfig
from unimetric.errors import UnimetricError
from unimetric.report.folders import Record
from unimetric.spec import parse

#: Settings that do not define a method: the execution of a run and its precision.
_EXECUTION = NO_RESULT | {"precision", "compile"}

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
        return self.runs[0].dataset, str(self.runs[0].settings.get("split", "standard"))

    def mean(self, metric: str) -> float:
        """Return the mean over the runs."""
        return float(np.mean([run.value(metric) for run in self.runs]))

    def half(self, metric: str, level: float = 0.95) -> float:
        """Return half of Student's interval for the mean, or NaN for fewer than three runs."""
        values = [run.value(metric) for run in self.runs]
        if len(values) < _SEEDS_FOR_INTERVAL:
            return math.nan
        return float(stats.t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))

    def range(self, metric: str) -> tuple[float, float]:
        """Return the lowest and the highest value of the runs."""
        values = [run.value(metric) for run in self.runs]
        return min(values), max(values)


def methods(records: list[Record]) -> list[Method]:
    """Group runs into methods, named by their label or by the settings that differ."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[json.dumps(_method_settings(record), sort_keys=True)].append(record)
    distinct = [_method_settings(runs[0]) for runs in groups.values()]
    values: dict[str, set[str]] = defaultdict(set)
    for settings in distinct:
        for key, value in settings.items():
            values[key].add(json.dumps(value))
    differ = [key for key in (distinct[0] if distinct else {}) if len(values[key]) > 1 and key not in ("dataset", "split")]
    found = []
    for runs, settings in zip(groups.values(), distinct, strict=True):
        study = [value for axis, value in runs[0].labels.items() if axis not in ("seed", "dataset", "split")]
        name = ", ".join(study) or ", ".join(str(settings.get(key)) for key in differ if settings.get(key)) or str(settings["loss"])
        found.append(Method(name, runs))
    return found


def _method_settings(record: Record) -> dict[str, Any]:
    # A run that is older than a setting has the default of that setting.
    settings = asdict(RunConfig()) | record.settings
    execution = _EXECUTION - record.labels.keys()  # a study of precisions compares them
    return {key: value for key, value in settings.items() if key != "seed" and key not in execution}


def measured(found: list[Method]) -> list[str]:
    """Return every metric that a run has on its test classes, in the order of the files."""
    names: dict[str, None] = {}
    for method in found:
        for run in method.runs:
            names |= dict.fromkeys(key.removeprefix("test/") for key in run.best if key.startswith("test/"))
    return list(names)


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
    found = re.match(r"[\w.]+(\(.*?\))?(?=/|$)", metric)
    try:
        call = parse(found[0] if found else metric)
    except UnimetricError:
        return False
    inner = call.named.get("metric")
    return is_structure(inner) if isinstance(inner, str) else _declared(call.name) == "neither"


@cache
def _declared(name: str) -> str:
    """Return the value of `better` that a metric of the package declares in a decorator."""
    file = _METRICS / f"{name}.py"
    if not name.isidentifier() or not file.is_file():
        return "higher"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Name) and decorator.id == "describes":
                    return "neither"
                for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                    if keyword.arg == "better" and isinstance(keyword.value, ast.Constant):
                        return str(keyword.value.value)
    return "higher"


_METRICS = Path(__file__).parents[1] / "metrics"


def format_value(metric: str, value: float) -> str:
    """Format a metric value for a table.

    Structure metrics are plain numbers, others are percentages.

    >>> format_value("spectral_decay", 11.0274), format_value("recall(k=1)", 0.6309)
    ('11.027', '63.09')
    """
    if math.isnan(value):
        return ""
    return f"{value:.3f}" if is_structure(metric) else f"{100 * value:.2f}"


# --- values of the papers -------------------------------------------------------------------------------------------


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Published:
    """A value from a paper.

    Args:
        text: The value in percent, with its spread if the paper reports one.
        source: Paper and table.
    """

    text: str
    source: str


def published(method: Method, metric: str) -> Published | None:
    """Return the value that a paper reports for the settings of a method, if there is one.

    Objectives, losses, miners, adapters and samplers must agree in every argument; backbones and heads in those that the table names.
    """
    for table in _tables()["table"]:
        if metric not in table["metrics"]:
            continue
        for row in table["rows"]:
            if _agrees(method, table.get("when", {}) | row.get("when", {})):
                value = row["values"][table["metrics"].index(metric)]
                if value != "":
                    return Published(str(value), table["source"])
    return None


_DEFAULTS = {"objective": "plain", "loss": "", "miner": "", "adapter": "", "sampler": "samples_per_class(n=2)"}


def _agrees(method: Method, when: dict[str, str]) -> bool:
    settings = method.runs[0].settings
    if "dataset" in when and _datasets(method.runs[0]) != _parts(when["dataset"]):
        return False
    when = {"split": "standard"} | when
    for key, default in _DEFAULTS.items():
        if key not in when and key == "loss":
            continue
        if not _same(str(settings.get(key, default)), when.get(key, default), exactly=True):
            return False
    mine = {"split": "standard"} | settings
    return all(_same(str(mine.get(key, "")), when[key], exactly=False) for key in ("backbone", "head", "split") if key in when)


def _datasets(run: Record) -> list[str]:
    """Return the dataset names of a run.

    For a union of packs, they come from `gallery.npz` if it exists.
    """
    if run.gallery and run.dataset.startswith("union("):
        return sorted(run.gallery["source"].tolist())
    return _parts(run.dataset)


def _parts(text: str) -> list[str]:
    names = [text]
    if text.startswith("union("):
        call = parse(text)
        names = call.named.get("parts") or call.positional[0]
    return sorted(name.partition("(")[0] for each in names for name in each.split(" + "))


def _same(mine: str, theirs: str, *, exactly: bool) -> bool:
    if not mine or not theirs:
        return mine == theirs
    try:
        a, b = parse(mine), parse(theirs)
    except UnimetricError:
        return False
    if a.name != b.name or a.positional != b.positional:
        return False
    return a.named == b.named if exactly else b.named.items() <= a.named.items()


# --- shifts and structure -------------------------------------------------------------------------------------------


def shift_of(run: Record) -> float:
    """Return the Frechet distance of a run's test and training classes, or NaN.

    The distance comes from the file of splits, or from the paper.
    """
    if run.gallery and not math.isnan(float(run.gallery["shift"])):
        return float(run.gallery["shift"])
    split = str(run.settings.get("split", ""))
    number = (
        re.search(r"\bsplit\s*=\s*(\d+)", split) if split.startswith("published(") else None
    )  # the splits of `ood` are not those of the paper
    distances = _tables()["fid"].get(run.dataset.partition("(")[0], [])
    return float(distances[int(number[1]) - 1]) if number and 0 < int(number[1]) <= len(distances) else math.nan


def shifts(found: list[Method], metric: str) -> list[dict[str, Any]]:
    """Return shifts, means and AGS of each method with results at several shifts."""
    rows: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    names: dict[tuple[str, str], str] = {}
    for method in found:
        # Group by settings, because two studies may use one name for different methods.
        settings = {key: value for key, value in _method_settings(method.runs[0]).items() if key not in ("dataset", "split")}
        place = method.task[0], json.dumps(settings, sort_keys=True)
        names.setdefault(place, method.name)
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
    """Return Pearson's r of every structure metric with every other one, per dataset."""
    rows = []
    for dataset in dict.fromkeys(method.task[0] for method in found):
        runs = [(method.name, run) for method in found if method.task[0] == dataset for run in method.runs]
        for structure in filter(is_structure, metrics):
            for judge in (metric for metric in metrics if not is_structure(metric)):
                points = [(run.value(structure), run.value(judge), name) for name, run in runs]
                points = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
                x, y = np.array([point[0] for point in points]), np.array([point[1] for point in points])
                if len(points) > 2 and x.std() > 0 and y.std() > 0:
                    r = float(np.corrcoef(x, y)[0, 1])
                    rows.append({"dataset": dataset, "x": structure, "y": judge, "r": r, "points": points})
    return rows
