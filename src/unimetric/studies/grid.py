"""Grid files: the settings of a run with lists for some of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unimetric.config import RunConfig, from_settings, read_toml
from unimetric.errors import UnimetricError
from unimetric.fit import check_declared_fit


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Args:
        config: Settings of the run.
        labels: Value of each axis: `{"method": "Margin", "seed": "0"}`.
    """

    config: RunConfig
    labels: dict[str, str]


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read the file of a grid or a search, with its lists and ranges."""
    return read_toml(path, like='`key = "text"` or `key = [1, 2]`')


def expand(settings: dict[str, Any], place: str = "settings") -> list[Run]:
    """Return every combination of the lists in a grid, in the order of the file.

    The last axis varies fastest.

    A list of values is an axis named after its key. A list of tables is an axis of settings that vary together; a table may have a
    `name`, and its lists are combined as well. `metrics` is a list by itself, and a list of lists is an axis. Duplicate runs are
    listed once, with their first labels.

    >>> [run.config.seed for run in expand({"seed": [0, 1], "epochs": 3})]
    [0, 1]
    >>> [run.labels for run in expand({"method": [{"name": "A", "loss": "margin"}, {"name": "B", "loss": "triplet", "seed": [1, 2]}]})]
    [{'method': 'A'}, {'method': 'B', 'seed': '1'}, {'method': 'B', 'seed': '2'}]
    """
    _check_size(settings, place)
    runs: dict[str, Run] = {}
    good: dict[str, dict[str, Any]] = {}  # check every value once, not once per combination
    for values, labels in _points(settings, place):
        together = {key: [values.get(each) for each in group] for group in _TOGETHER for key in group}
        marks = {key: f"{key} = {together.get(key, value)!r}" for key, value in values.items()}
        new = {key: value for key, value in values.items() if marks[key] not in good}
        if new:
            checked = from_settings(new, place)
            good |= {marks[key]: {key: getattr(checked, key)} for key in new}
        config = RunConfig(**{name: value for mark in marks.values() for name, value in good[mark].items()})
        runs.setdefault(config.run_id, Run(config, labels))
    return list(runs.values())


#: Largest number of combinations of a grid.
MOST = 10_000


def _check_size(settings: dict[str, Any], place: str) -> None:
    """Raise an error if a grid has too many combinations.

    They are counted without listing them.
    """
    lengths = {key: sum(_count(item) for item in value) for key, value in settings.items() if is_axis(key, value)}
    count = math.prod(lengths.values())
    if count > MOST:
        axes = " x ".join(f"{length:,} of `{key}`" for key, length in lengths.items())
        raise UnimetricError(
            f"{place}: a grid must have at most {MOST:,} combinations, got {count:,}: {axes}",
            "shorten a list, or search with `unimetric tune`",
        )


def _count(value: Any) -> int:
    """Return the number of points of one value of an axis.

    A table with lists has more than one.
    """
    if not isinstance(value, dict):
        return 1
    return math.prod(sum(_count(item) for item in each) for key, each in value.items() if is_axis(key, each))


#: Settings whose own values are lists.
_LISTS = ("metrics", "watch_datasets")

#: Settings that are checked together.
_TOGETHER = (("metrics", "chosen_by"), ("precision", "clip_norm", "clip_value"))


def _points(settings: dict[str, Any], place: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    axes: list[list[tuple[dict[str, Any], dict[str, str]]]] = []
    for key, value in settings.items():
        if not is_axis(key, value):
            axes.append([({key: value}, {})])
        elif not value:
            raise UnimetricError(f"{place}: `{key}` must have at least one value, got an empty list", "add a value, or remove the key")
        elif all(isinstance(item, dict) for item in value):
            axes.append([point for number, row in enumerate(value) for point in _row(key, row, number, place)])
        else:
            axes.append([({key: item}, {key: _text(item)}) for item in value])
    for combination in itertools.product(*axes):
        values: dict[str, Any] = {}
        labels: dict[str, str] = {}
        for some, marks in combination:
            values |= some
            labels |= marks
        yield values, labels


def is_axis(key: str, value: Any) -> bool:
    """Return whether a setting of a grid is a list of values to combine.

    >>> is_axis("seed", [0, 1]), is_axis("metrics", ["recall(k=1)"]), is_axis("metrics", [["recall(k=1)"], ["nmi"]])
    (True, False, True)
    """
    if key in _LISTS:
        return isinstance(value, list) and any(isinstance(item, list) for item in value)
    return isinstance(value, list)


def _row(axis: str, row: dict[str, Any], number: int, place: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    fixed = [str(value) for key, value in row.items() if key != "name" and not is_axis(key, value)]
    name = str(row.get("name", ", ".join(fixed) or number + 1))
    for values, labels in _points({key: value for key, value in row.items() if key != "name"}, f"{place}: {axis} {number + 1}"):
        yield values, {axis: name} | labels


def _text(value: Any) -> str:
    """Return the label of a value. No component, as in `miner = ["", "semihard"]`, is "none"."""
    return ("; ".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"


def read_grid(path: str | Path, /, **overrides: Any) -> list[Run]:
    """Read the runs of a grid file, with some settings replaced in all of them.

    Args:
        path: TOML file.
        overrides: Settings by name. A list is an axis, as in the file.
    """
    settings = read_settings(path)
    if "search" in settings:
        raise UnimetricError(f"{path}: has a [search] table, so it is a search", "use `unimetric tune`, or remove the table")
    # Overrides come last, so that they also replace settings in the tables of a list.
    return expand({key: value for key, value in settings.items() if key not in overrides} | overrides, str(path))


def check_runs(runs: list[Run], place: str, *, build: bool = True, seen: set[RunConfig] | None = None) -> None:
    """Check that the components of all runs fit together.

    Args:
        runs: Runs of a study.
        place: Name of the study in errors.
        build: Whether each distinct combination is also built once, without images and weights. Loads torch.
        seen: Combinations that are already checked. New ones are added.
    """
    names = {id(run): ": ".join(filter(None, (place, ", ".join(run.labels.values())))) for run in runs}
    plain = RunConfig()
    apart = {key: getattr(plain, key) for key in ("seed", "epochs", "dataset", "split", "metrics")}
    for config, name in {replace(run.config, **apart): names[id(run)] for run in reversed(runs)}.items():
        check_declared_fit(config, name)
    if not build:
        return
    import torch

    from unimetric.training.build import check_fit

    seen = set() if seen is None else seen
    for run in runs:
        name = names[id(run)]
        # Random initialization of a network takes seconds. So each network is built once, on the meta device, and all other
        # components are checked with the small backbone.
        network = replace(plain, backbone=run.config.backbone, adapter=run.config.adapter)
        rest = replace(run.config, **apart, backbone=plain.backbone, adapter=plain.adapter)
        if network not in seen:
            with torch.device("meta"):
                check_fit(network, name)
        if rest not in seen:
            check_fit(rest, name)
        seen |= {network, rest}
