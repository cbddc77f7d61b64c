"""Runs that differ in their seed alone are one method: means, intervals, and what the papers have."""

from __future__ import annotations

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

#: Settings that do not make another method: how a run is carried out, and how exactly.
_CARRIED_OUT = NO_RESULT | {"precision", "compile"}
#: Metrics of the space's structure: neither more nor less of them is better.
STRUCTURE = ("pi_intra", "pi_inter", "pi_ratio", "spectral_decay", "uniformity", "class_spectra", "density")


@dataclass(frozen=True, eq=False)
class Method:
    """Runs with the same settings but for the seed.

    Args:
        name: what sets it apart from the others.
        runs: one a seed.
    """

    name: str
    runs: list[Record]

    @property
    def task(self) -> tuple[str, str]:
        """The pictures and the split: what methods can be compared on."""
        return self.runs[0].dataset, str(self.runs[0].settings.get("split", "standard"))

    def mean(self, metric: str) -> float:
        """Over the runs."""
        return float(np.mean([run.value(metric) for run in self.runs]))

    def half(self, metric: str, level: float = 0.95) -> float:
        """Half of Student's interval for the mean; not a number for a single run."""
        values = [run.value(metric) for run in self.runs]
        if len(values) < 2:
            return math.nan
        return float(stats.t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def methods(records: list[Record]) -> list[Method]:
    """Runs put together, each method with a name: as the study calls it, or the settings that differ."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[json.dumps(_method_settings(record), sort_keys=True)].append(record)
    essences = [_method_settings(runs[0]) for runs in groups.values()]
    values: dict[str, set[str]] = defaultdict(set)
    for essence in essences:
        for key, value in essence.items():
            values[key].add(json.dumps(value))
    differ = [key for key in (essences[0] if essences else {}) if len(values[key]) > 1 and key not in ("dataset", "split")]
    found = []
    for runs, essence in zip(groups.values(), essences, strict=True):
        study = [value for axis, value in runs[0].labels.items() if axis not in ("seed", "dataset", "split")]
        name = ", ".join(study) or ", ".join(str(essence.get(key)) for key in differ if essence.get(key)) or str(essence["loss"])
        found.append(Method(name, runs))
    return found


def _method_settings(record: Record) -> dict[str, Any]:
    # A run of before a setting was there had what is its default now.
    settings = asdict(RunConfig()) | record.settings
    carried_out = _CARRIED_OUT - record.labels.keys()  # a study of precisions compares them
    return {key: value for key, value in settings.items() if key != "seed" and key not in carried_out}


def measured(found: list[Method]) -> list[str]:
    """Every metric that some run has on its test classes, in the order of the files."""
    names: dict[str, None] = {}
    for method in found:
        for run in method.runs:
            names |= dict.fromkeys(key.removeprefix("test/") for key in run.best if key.startswith("test/"))
    return list(names)


def at_own_epochs(record: Record) -> Record:
    """Each metric that judges at its own best epoch on the test classes, those of the structure at that of the first metric.

    So do Roth et al. 2020 report, and it flatters: with the usual way, all metrics at one epoch, theirs are a little above ours.
    """
    best = dict(record.best)
    for line in record.lines:
        if line["epoch"]:  # before the first, nothing was trained
            for key, value in line.items():
                metric = key.removeprefix("test/")
                if key.startswith("test/") and not is_structure(metric) and math.isfinite(value):
                    best[key] = (min if record.prefers_less(metric) else max)(value, best.get(key, value))
    return replace(record, best=best)


def direction(found: list[Method], metric: str) -> int:
    """1 if more of a metric is better, -1 if less is."""
    return -1 if any(run.prefers_less(metric) for method in found for run in method.runs) else 1


def is_structure(metric: str) -> bool:
    """Whether a metric describes the space, rather than judging it."""
    return metric.split("(")[0].split("/")[0] in STRUCTURE


def shown(metric: str, value: float) -> str:
    """A number for a table: percent if it judges, as it is if it describes."""
    return "" if math.isnan(value) else f"{value:.3f}" if is_structure(metric) else f"{100 * value:.2f}"


# --- what the papers have -------------------------------------------------------------------------------------------


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Published:
    """A paper's number.

    Args:
        text: the number, in percent, with its spread if the paper gives one.
        source: the paper and its table.
    """

    text: str
    source: str


def published(method: Method, metric: str) -> Published | None:
    """What a paper reports for these settings, if one does. Losses, miners and so on must agree in every argument, backbones and heads in
    those that the table names."""
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
    """The names of a run's datasets; of a union of packs those that were packed, if the run has left them."""
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
    """How far a run's test classes lie from its training classes: as its file of splits says, or as the paper has it for its splits."""
    if run.gallery and not math.isnan(float(run.gallery["shift"])):
        return float(run.gallery["shift"])
    split = str(run.settings.get("split", ""))
    number = re.search(r"\bsplit\s*=\s*(\d+)", split) if split.startswith("published(") else None  # those of `ood` are not the paper's
    distances = _tables()["fid"].get(run.dataset.partition("(")[0], [])
    return float(distances[int(number[1]) - 1]) if number and 0 < int(number[1]) <= len(distances) else math.nan


def shifts(found: list[Method], metric: str) -> list[dict[str, Any]]:
    """For each method that was measured at several shifts of a dataset: shifts, means and the aggregated generalisation score."""
    rows: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    names: dict[tuple[str, str], str] = {}
    for method in found:
        # By its settings: two studies may give one name to different methods.
        essence = {key: value for key, value in _method_settings(method.runs[0]).items() if key not in ("dataset", "split")}
        place = method.task[0], json.dumps(essence, sort_keys=True)
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
    """Pearson's correlation of every structure metric with every judging metric over the runs of a dataset, with its points."""
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
