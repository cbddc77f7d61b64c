"""Read finished run folders."""

from __future__ import annotations

import json
import math
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.errors import UnimetricError

_NEEDED_ARRAYS = {"embeddings", "labels", "names", "source", "queries", "neighbours", "spectrum", "thumbnails", "ends", "shift"}

_MEASURED = ("loss", "test/", "validation/")


@dataclass(frozen=True, eq=False)
class Record:
    """One finished run.

    Args:
        folder: Run folder.
        run_id: Id of the run.
        settings: Content of `config.toml`.
        lines: Content of `metrics.jsonl`, one dictionary per epoch.
        best: Line of the best epoch.
        environment: Content of `environment.json`.
        labels: Labels in its study, by axis. Empty without a study.
        gallery: Arrays of `gallery.npz`. Empty without that file.
    """

    folder: Path
    run_id: str
    settings: dict[str, Any]
    lines: list[dict[str, Any]]
    best: dict[str, Any]
    environment: dict[str, Any]
    labels: dict[str, str]
    gallery: dict[str, np.ndarray] = field(default_factory=dict)

    def value(self, metric: str, part: str = "test") -> float:
        """Return a metric at the best epoch, or NaN if the run does not have it."""
        return float(self.best.get(f"{part}/{metric}", math.nan))

    def prefers_less(self, metric: str) -> bool:
        """Return whether a lower value of a metric is better, as recorded by the run."""
        return any(metric == text or metric.startswith(f"{text}/") for text in self.best.get("lower_is_better", ()))

    @property
    def dataset(self) -> str:
        """Dataset of the run. For a pack, the names of the packed datasets."""
        text = str(self.settings["dataset"])
        if self.gallery and text.startswith("pack("):
            return " + ".join(name for name in self.gallery["source"].tolist() if name) or text
        return text


def read_runs(places: list[Path]) -> tuple[list[Record], list[tuple[Path, str]]]:
    """Read every finished run in some folders, or one level below.

    Args:
        places: Run folders, or folders of run folders.

    Returns:
        The runs, and the skipped folders with the reason.
    """
    records: list[Record] = []
    skipped: list[tuple[Path, str]] = []
    seen: set[Path] = set()
    known: dict[str, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UnimetricError(f"{place}: no such folder", "name run folders, or a folder that `unimetric bench --out` filled")
        labels = _labels(place / "study.json")
        one = (place / "config.toml").exists()
        order = {run_id: number for number, run_id in enumerate(labels)}  # the order of the grid
        inside = [each for each in place.iterdir() if each.is_dir() and each.name != "logs"]
        for folder in [place] if one else sorted(inside, key=lambda each: (order.get(each.name, len(order)), each.name)):
            if folder.resolve() in seen or folder.name.startswith("."):
                continue
            seen.add(folder.resolve())
            try:
                record = _read(folder, labels)
                # Two studies may share a run, which counts as one seed.
                if (first := known.setdefault(str(record.environment.get("run_id", folder.resolve())), folder)) != folder:
                    raise _Unfinished(f"the same run as {first}")
                records.append(record)
            except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
                skipped.append((folder, _reason(error)))
    return records, skipped


class _Unfinished(ValueError):
    pass


def _read(folder: Path, labels: dict[str, dict[str, str]]) -> Record:
    if not (folder / "config.toml").exists():
        raise _Unfinished("not a run folder (it has no config.toml)")
    settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8-sig"))
    if missing := {"dataset", "loss", "seed", "epochs", "metrics"} - settings.keys():
        raise _Unfinished(f"config.toml has no `{min(missing)}`")
    if odd := [key for key, value in settings.items() if not isinstance(value, str | int | float | list)]:
        raise _Unfinished(f"config.toml: `{odd[0]}` must be a string, number, boolean or list")
    if not (folder / "done").exists():
        raise _Unfinished("not finished (it has no `done`)")
    best = json.loads((folder / "done").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in [best, *lines]:
        if not isinstance(line, dict) or not isinstance(line.get("epoch"), int):
            raise _Unfinished("metrics.jsonl or done has a line without an epoch")
        if odd := [key for key, value in line.items() if key.startswith(_MEASURED) and not isinstance(value, int | float)]:
            raise _Unfinished(f"metrics.jsonl or done: `{odd[0]}` is not a number")
    if not isinstance(best.get("lower_is_better", []), list):
        raise _Unfinished("done: `lower_is_better` is not a list")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    if not isinstance(environment, dict):
        raise _Unfinished("environment.json must contain an object")
    run_id = str(environment.get("run_id", folder.name))
    return Record(folder, run_id, settings, lines, best, environment, labels.get(run_id, {}), _gallery(folder / "gallery.npz"))


def _gallery(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if missing := _NEEDED_ARRAYS - arrays.keys():
        raise _Unfinished(f"gallery.npz has no `{min(missing)}`")
    points = len(arrays["embeddings"]) if arrays["embeddings"].ndim == 2 else -1
    rows = all(arrays[key].shape == (points,) for key in ("labels", "names", "ends"))
    if not rows or arrays["neighbours"].ndim != 2 or arrays["spectrum"].ndim != 1 or arrays["shift"].dtype.kind != "f":
        raise _Unfinished("gallery.npz: the shapes of the arrays do not match")
    for key in ("queries", "neighbours"):
        if arrays[key].dtype.kind not in "iu" or (arrays[key].size and not 0 <= arrays[key].min() <= arrays[key].max() < points):
            raise _Unfinished(f"gallery.npz: `{key}` has indices out of range")
    return arrays


def _labels(path: Path) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {run_id: {axis: str(value) for axis, value in names.items()} for run_id, names in found.items() if isinstance(names, dict)}


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _Unfinished) else f"unreadable: {error or type(error).__name__}"
