"""Values of the papers (`papers.toml`) for the methods of a report.

Each comes with the settings that differ from those of the paper.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from unimetric.config import PARTS, RunConfig
from unimetric.errors import UnimetricError
from unimetric.report.folders import Record
from unimetric.report.protocols import Protocol as PaperProtocol
from unimetric.report.protocols import all_arguments, by_argument, canonical, compare, parse, read_protocols, wanted_settings

#: Settings that define a method. A row of a paper's table belongs to runs that agree in all of them, in every argument.
_METHOD = {"objective": "plain", "loss": "margin", "miner": "", "adapter": ""}

#: Settings that are not compared with the paper's: those of the method agree, and the others do not change a result.
_IGNORED = ("dataset", "metrics", "chosen_by", "split", *_METHOD)


class Method(Protocol):
    """Runs with the same settings except for the seed, as in `numbers.Method`."""

    @property
    def runs(self) -> list[Record]:
        """One run per seed."""
        ...


@cache
def read_papers() -> dict[str, Any]:
    """Return the content of `papers.toml`."""
    return tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))


def paper_distance(dataset: str, number: int) -> float:
    """Return the Frechet distance that the paper has for a split of ooDML, or NaN."""
    distances = read_papers()["fid"].get(dataset, [])
    return float(distances[number - 1]) if 0 < number <= len(distances) else math.nan


@dataclass(frozen=True)
class Published:
    """A value from a paper.

    Args:
        text: The value in percent, with its spread if the paper reports one.
        source: Paper and table.
        differs: Settings of the run that are not the paper's, such as `epochs 20, the paper 150`. Empty if all are the same.
    """

    text: str
    source: str
    differs: tuple[str, ...] = ()


def published(method: Method, metric: str) -> Published | None:
    """Return the value that a paper reports for a method, with the settings that differ.

    Returns None if there is none. A method is defined by dataset, number of the split, objective, loss, miner
    and adapter in every argument, and by the architectures of backbone and head. Of several values, the one
    with the fewest differences is returned.
    """
    run = method.runs[0]
    found: list[Published] = []
    for table, row, value in _rows(tuple(_datasets(run)), _metric_key(metric)):
        when = table["when"] | row["when"]
        if _is_method(run, when):
            with suppress(UnimetricError):  # settings of a run that are not spec strings
                found.append(Published(value, table["source"], tuple(_differences(run, when, table["source"]))))
    return min(found, key=lambda each: len(each.differs), default=None)


@cache
def _rows(datasets: tuple[str, ...], metric: Any) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """Return the tables and rows with a value of a metric on some datasets, and the value."""
    rows = []
    for table in read_papers()["table"]:
        for place, name in enumerate(table["metrics"]):
            if _metric_key(name) == metric:
                named = [(table, row, row["values"][place]) for row in table["rows"] if row["values"][place] != ""]
                rows += [each for each in named if tuple(parts((table["when"] | each[1]["when"])["dataset"])) == datasets]
    return rows


@cache
def _metric_key(text: str) -> Any:
    """Return a metric with all its arguments, and its dataset.

    `unified` is `unified(k=1)`.
    """
    found = re.fullmatch(r"([\w.]+(?:\(.*?\))?)(?:/(.*))?", text)
    return (_complete("metrics", found[1]), found[2]) if found else text


def agrees(run: Record, when: dict[str, Any]) -> bool:
    """Return whether a run has all settings that a row of a table names.

    Args:
        run: A run. Only its settings are compared.
        when: Settings of the table and of the row.
    """
    if _datasets(run) != parts(when["dataset"]) or not _is_method(run, when):
        return False
    return not any(compare(_config(run), _wanted_by_row(when)))


def measures(config: RunConfig, metric: str) -> bool:
    """Return whether a run computes a metric of a table on its test classes.

    Args:
        config: Settings of the run.
        metric: Metric, with `/DATASET` after it if it is of one of several datasets.
    """
    return _metric_key(metric)[0] in [_complete("metrics", each) for each in config.test_metrics]


def _is_method(run: Record, when: dict[str, Any]) -> bool:
    """Return whether a run on the dataset of a row has its method."""
    settings = run.settings
    for key, default in _METHOD.items():
        if (key in when or key != "loss") and _complete(key, str(settings.get(key, default))) != _complete(key, when.get(key, default)):
            return False
    for key in ("backbone", "head"):
        if key in when and _architecture(str(settings.get(key, ""))) != _architecture(when[key]):
            return False
    return _split_number(run.split) == _split_number(when.get("split", "standard"))


@cache
def _complete(key: str, text: str) -> Any:
    """Return a component with all its arguments, written or default, for comparison."""
    if not text:
        return ""
    try:
        call = parse(text)
        return call.name, tuple(sorted((each, repr(canonical(value))) for each, value in all_arguments(PARTS[key], text).items()))
    except UnimetricError:
        return text


@cache
def _architecture(text: str) -> str:
    """Return the name of a component and that of its network, without the tag of the weights.

    >>> _architecture("timm(name='resnet50.tv_in1k', pretrained=True)"), _architecture("linear(dim=128)")
    ('timm resnet50', 'linear')
    """
    try:
        call = parse(text)
    except UnimetricError:
        return text
    return f"{call.name} {str(call.named.get('name', '')).partition('.')[0]}".strip()


@cache
def _split_number(text: str) -> Any:
    """Return the number of a split of ooDML, from whichever file, or the split itself."""
    try:
        call = parse(text)
    except UnimetricError:
        return text
    if call.name in ("ood", "published") and "key" not in call.named:
        return call.named.get("split", 1)
    return "standard" if call.name == "standard" else text


def _wanted_by_row(when: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a row of a table names, by argument.

    Settings that define its method are excluded.
    """
    wanted: dict[str, Any] = {}
    for key, value in when.items():
        if key not in _IGNORED:
            wanted |= by_argument(key, value)
    return wanted


def _differences(run: Record, when: dict[str, Any], source: str) -> Iterator[str]:
    """Yield the settings of a run that differ from a row of a table, or from its paper."""
    config, wanted = _config(run), _wanted_by_row(when)
    for protocol in _cited(source):
        general = {key: value for key, (value, _) in wanted_settings(protocol, config).items()}
        for key, value in _for_row(general, when).items():
            wanted.setdefault(key, value)
    for _, key, expected, got in compare(config, dict(sorted(wanted.items()))):
        yield f"{key} {_short(got)}, the paper {_short(expected)}"
    yield from _split_difference(run, when)


def _for_row(settings: dict[str, Any], when: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a paper that hold for a row of a table.

    Settings of another component than the row's do not hold.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        setting = key.partition(".")[0]
        if setting in _IGNORED:
            continue
        if setting not in when or setting not in PARTS:
            found[key] = value
        elif isinstance(value, dict):  # one of several networks
            same = [text for text in value["any"] if _architecture(text) == _architecture(when[setting])]
            found |= by_argument(setting, same[0]) if same else {}
        elif settings.get(setting) == parse(when[setting]).name:
            found[key] = value
    return found


def _split_difference(run: Record, when: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence if the split is not known to be the authors' one."""
    number = _split_number(run.split)
    if not isinstance(number, int):
        return
    theirs = paper_distance(parts(when["dataset"])[0], number)
    if math.isnan(run.shift):
        yield "split from a file without a Frechet distance, which may not be the authors' one"
    elif not abs(run.shift - theirs) <= 0.06:  # the paper has one decimal
        yield f"split of Frechet distance {run.shift:.1f}, the paper {theirs:.1f}"


def _short(value: str) -> str:
    return value.strip("'")


_protocols = cache(read_protocols)


@cache
def _cited(source: str) -> list[PaperProtocol]:
    return [protocol for protocol in _protocols() if any(text in source for text in protocol.cited)]


def _config(run: Record) -> RunConfig:
    """Return the settings of a run, with datasets instead of packs."""
    known = {each.name for each in fields(RunConfig)}
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in run.settings.items() if key in known
    }
    names = _datasets(run)
    settings["dataset"] = names[0] if len(names) == 1 else f"union(parts={names})"
    return RunConfig(**settings)


def _datasets(run: Record) -> list[str]:
    """Return the dataset names of a run.

    For a union of packs, they come from `gallery.npz` if it exists.
    """
    if run.gallery and run.dataset.startswith("union("):
        return sorted(run.gallery["source"].tolist())
    return parts(run.dataset)


def parts(text: str) -> list[str]:
    """Return the names of the datasets in a spec string, or in the names of a pack.

    >>> parts("union(parts=['sop', 'cub200(root=1)'])"), parts("cub200 + sop")
    (['cub200', 'sop'], ['cub200', 'sop'])
    """
    names = [text]
    if text.startswith("union("):
        try:
            call = parse(text)
        except UnimetricError:
            return [text]
        given = [*call.positional, call.named.get("parts")][0]
        names = [str(part) for part in given] if isinstance(given, list | tuple) else [text]
    return sorted(name.partition("(")[0] for each in names for name in each.split(" + "))
