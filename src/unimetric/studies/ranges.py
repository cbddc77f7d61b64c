"""Search files: settings with `{names}` in them, and the range of each name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from unimetric.errors import UnimetricError, closest
from unimetric.studies.grid import Run, expand, is_axis, read_grid, read_settings


def read_any(path: str | Path, /, **overrides: Any) -> list[Run]:
    """Read the runs of a grid, or those at the ends of the ranges of a search.

    Args:
        path: TOML file.
        overrides: Settings by name, which replace those of the file.
    """
    if "search" in read_settings(path):
        return boundary_runs(path, **overrides)
    return read_grid(path, **overrides)


def is_grid(path: str | Path) -> bool:
    """Return whether a file defines several runs or a search, not one run."""
    settings = read_settings(path)
    return "search" in settings or any(is_axis(key, value) for key, value in settings.items())


_NAME = re.compile(r"\{(\w+)\}")


def read_search(path: str | Path, /, **overrides: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the settings of a search file, and the range of each name.

    Both must have the same names.
    """
    settings = read_settings(path) | overrides
    ranges = settings.pop("search", {})
    if not isinstance(ranges, dict):
        raise UnimetricError(f"{path}: `search` must be a table", "write `[search]` with `name = {low = 0.1, high = 1.0}`")
    wanted = {name for value in settings.values() for name in _names(value)}
    if not wanted:
        raise UnimetricError(
            f"{path}: a search requires at least one `{{name}}`",
            "write `{name}` in a setting and `[search]` with `name = {low = 0.1, high = 1.0}`",
        )
    for name in sorted(wanted ^ set(ranges)):
        known = ranges if name in wanted else wanted
        raise UnimetricError(f"{path}: `{name}` is in {'the settings' if name in wanted else '[search]'} only", closest(name, known))
    for name, limits in ranges.items():
        if not _is_range(limits):
            raise UnimetricError(f"{path}: the range of `{name}` is not valid", "write `{low = 0.1, high = 1.0}` or `{choices = [1, 2]}`")
    return settings, ranges


def _is_range(limits: Any) -> bool:
    if not isinstance(limits, dict):
        return False
    if set(limits) == {"choices"}:
        return isinstance(limits["choices"], list) and len(limits["choices"]) > 0
    if not {"low", "high"} <= set(limits) <= {"low", "high", "log", "whole"}:
        return False
    low, high = limits["low"], limits["high"]
    kinds = (int,) if limits.get("whole") else (int, float)
    return type(low) in kinds and type(high) in kinds and low <= high < math.inf and low > (0 if limits.get("log") else -math.inf)


def boundary_runs(path: str | Path, /, **overrides: Any) -> list[Run]:
    """Return the runs at the ends of the ranges of a search, for a check of the ranges."""
    settings, ranges = read_search(path, **overrides)
    ends = []
    for which, key in ((0, "low"), (-1, "high")):
        ends.append({name: limits["choices"][which] if "choices" in limits else limits[key] for name, limits in ranges.items()})
    return [run for values in ends for run in expand(filled(settings, values), str(path))]


def _names(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _names(item)]
    return _NAME.findall(value) if isinstance(value, str) else []


def filled(settings: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Replace names by values. A setting that consists of one name becomes the value itself.

    >>> filled({"loss": "margin(beta={beta})", "epochs": "{epochs}"}, {"beta": 0.6, "epochs": 3})
    {'loss': 'margin(beta=0.6)', 'epochs': 3}
    """

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str):
            return value
        alone = _NAME.fullmatch(value)
        return values[alone[1]] if alone else _NAME.sub(lambda match: str(values[match[1]]), value)

    return {key: fill(value) for key, value in settings.items()}
