"""Read finished run folders."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.config import split_metric
from unimetric.errors import UnimetricError
from unimetric.report.escape import one_line
from unimetric.runs.record import check_files
from unimetric.splits.ood import distance_of

#: Arrays of `gallery.npz`: number of dimensions and kinds of numpy's types.
_ARRAYS = {
    "embeddings": (2, "f"),
    "labels": (1, "iu"),
    "names": (1, "U"),
    "source": (1, "U"),
    "queries": (1, "iu"),
    "neighbours": (2, "iu"),
    "spectrum": (1, "f"),
    "thumbnails": (1, "u"),
    "ends": (1, "iu"),
    "shift": (0, "f"),
}

#: Arrays that older runs do not have.
_LATER = {
    "scores": (2, "f"),
    "default": (0, "b"),
    "class_names": (1, "U"),
    "class_recall": (1, "f"),
    "class_queries": (1, "iu"),
    "class_confused": (1, "U"),
}

_MEASURED = ("loss", "test/", "validation/", "train/")


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
        raw: Metric values `PART/METRIC` of the raw backbone, without head and adapter. Empty if they were not measured.
    """

    folder: Path
    run_id: str
    settings: dict[str, Any]
    lines: list[dict[str, Any]]
    best: dict[str, Any]
    environment: dict[str, Any]
    labels: dict[str, str]
    gallery: dict[str, np.ndarray] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)

    def value(self, metric: str) -> float:
        """Return a metric at the best epoch, or NaN if the run does not have it.

        Args:
            metric: Metric of the test classes, or `train: METRIC`.
        """
        return float(self.best.get("/".join(split_metric(metric)), math.nan))

    def raw_value(self, metric: str) -> float:
        """Return a metric of the raw backbone, or NaN if it was not measured."""
        return float(self.raw.get("/".join(split_metric(metric)), math.nan))

    def prefers_less(self, metric: str) -> bool:
        """Return whether a lower value of a metric is better, as recorded by the run."""
        metric = split_metric(metric)[1]
        return any(metric == text or metric.startswith(f"{text}/") for text in self.best.get("lower_is_better", ()))

    @cached_property
    def shift(self) -> float:
        """Frechet distance of the split in its file, or NaN."""
        return float(self.gallery["shift"]) if self.gallery else distance_of(self.split)

    @property
    def split(self) -> str:
        """Split of the run."""
        return str(self.settings.get("split", "standard"))

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
        The runs, and the skipped folders and files with the reason. A run with a damaged `gallery.npz` or `environment.json` is
        read without that file.
    """
    records: list[Record] = []
    skipped: list[tuple[Path, str]] = []
    seen: set[Path] = set()
    known: dict[str, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UnimetricError(f"{place}: no such folder", "name run folders, or a folder that `unimetric bench --out` filled")
        labels = _optional(place / "study.json", _labels, skipped)
        for folder in _run_folders(place, labels):
            if folder.resolve() in seen or folder.name.startswith("."):
                continue
            seen.add(folder.resolve())
            try:
                record = _read(folder, labels, skipped)
            except _Skipped as error:
                skipped.append((error.path, str(error)))
                continue
            # Two studies may share a run, which counts as one seed.
            first = known.setdefault(str(record.environment.get("run_id", folder.resolve())), folder)
            if first == folder:
                records.append(record)
            else:
                skipped.append((folder, f"the same run as {first}"))
    return records, skipped


def _run_folders(place: Path, labels: dict[str, dict[str, str]]) -> list[Path]:
    """Return the folder itself if it is a run, else those in it, in the order of the grid."""
    if (place / "config.toml").exists():
        return [place]
    order = {run_id: number for number, run_id in enumerate(labels)}
    inside = [each for each in place.iterdir() if each.is_dir() and each.name != "logs"]
    return sorted(inside, key=lambda each: (order.get(each.name, len(order)), each.name))


class _Skipped(Exception):
    """A folder or file that is not read, with the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def _load(path: Path, read: Callable[[Path], Any]) -> Any:
    """Return what a function reads from a file, or raise an error that names the file."""
    try:
        return read(path)
    # A damaged archive can raise almost anything: errors of zip, zlib, struct and the tokenizer, or no memory for a shape.
    except Exception as error:
        reason = str(error) if isinstance(error, _Invalid) else f"damaged: {error or type(error).__name__}"
        raise _Skipped(path, one_line(reason)) from None


def _optional(path: Path, read: Callable[[Path], Any], skipped: list[tuple[Path, str]]) -> Any:
    """Return what a function reads from a file, or an empty dictionary.

    The dictionary is empty if the file is missing or damaged. A damaged file is added to `skipped`.
    """
    if not path.exists():
        return {}
    try:
        return _load(path, read)
    except _Skipped as error:
        skipped.append((error.path, str(error)))
        return {}


class _Invalid(ValueError):
    pass


def _read(folder: Path, labels: dict[str, dict[str, str]], skipped: list[tuple[Path, str]]) -> Record:
    if not (folder / "config.toml").exists():
        raise _Skipped(folder, "not a run folder (it has no config.toml)")
    if not (folder / "done").exists():
        raise _Skipped(folder, "not finished (it has no `done`)")
    settings = _load(folder / "config.toml", _settings)
    best = _load(folder / "done", lambda path: _log_line(path.read_text(encoding="utf-8")))
    lines = _load(folder / "metrics.jsonl", _log_lines)
    _check_numbers(folder)
    environment = _optional(folder / "environment.json", _object, skipped)
    gallery = _optional(folder / "gallery.npz", _gallery, skipped)
    run_id = str(environment.get("run_id", folder.name))
    raw: dict[str, float] = next((line["raw"] for line in (best, *lines) if "raw" in line), {})
    return Record(folder, run_id, settings, lines, best, environment, labels.get(run_id, {}), gallery, raw)


def _check_numbers(folder: Path) -> None:
    """Skip a run whose results were modified after it had ended."""
    try:
        check_files(folder, ("done", "metrics.jsonl"))
    except UnimetricError as error:
        raise _Skipped(folder, one_line(error.message.removeprefix(f"{folder}{os.sep}"))) from None


def _settings(path: Path) -> dict[str, Any]:
    settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    if missing := {"dataset", "loss", "seed", "epochs", "metrics"} - settings.keys():
        raise _Invalid(f"has no `{min(missing)}`")
    for key, value in settings.items():
        if not all(isinstance(each, str | int | float) for each in (value if isinstance(value, list) else [value])):
            raise _Invalid(f"`{key}` must be a string, number, boolean or list")
    return settings


def _log_lines(path: Path) -> list[dict[str, Any]]:
    return [_log_line(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _log_line(text: str) -> dict[str, Any]:
    line = json.loads(text)
    if not isinstance(line, dict) or not isinstance(line.get("epoch"), int):
        raise _Invalid("has a line without an epoch")
    line = _with_parts(line)
    line |= {key: _number(value, key) for key, value in line.items() if key.startswith(_MEASURED)}
    raw = line.get("raw", {})
    if not isinstance(raw, dict):
        raise _Invalid("`raw` is not an object")
    if raw:
        line["raw"] = {key if key.startswith(_MEASURED) else f"test/{key}": _number(value, key) for key, value in _with_parts(raw).items()}
    line["gain"] = _gains(line.get("gain", {}))
    lower = line.get("lower_is_better", [])
    if not isinstance(lower, list) or not all(isinstance(each, str) for each in lower):
        raise _Invalid("`lower_is_better` is not a list of metrics")
    return line


def _gains(gains: Any) -> dict[str, dict[str, Any]]:
    """Return the gains of a run over its untrained network by dataset, after checking them."""
    if not isinstance(gains, dict) or not all(isinstance(gain, dict) and isinstance(gain.get("metric"), str) for gain in gains.values()):
        raise _Invalid("`gain` is not an object of gains")
    for name, gain in gains.items():
        for key in ("untrained", "trained", "gain", *({"from", "to"} & gain.keys())):
            _number(gain.get(key), f"{key} of {name}")
    return gains


def _with_parts(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with metrics of the training images as `train/METRIC`.

    Lines of files may also have them as `train: METRIC`.
    """
    return {"/".join(split_metric(key)) if key.startswith("train:") else key: value for key, value in line.items()}


def _number(value: Any, key: str) -> float:
    if not isinstance(value, int | float):
        raise _Invalid(f"`{key}` is not a number")
    return float(value)


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise _Invalid("must contain an object")
    return found


def _gallery(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if missing := _ARRAYS.keys() - arrays.keys():
        raise _Invalid(f"has no `{min(missing)}`")
    for key, (dimensions, kinds) in (_ARRAYS | _LATER).items():
        if key in arrays and (arrays[key].ndim != dimensions or arrays[key].dtype.kind not in kinds):
            raise _Invalid(f"`{key}` must have {dimensions} dimensions, got {arrays[key].dtype} {arrays[key].shape}")
    points = len(arrays["embeddings"])
    if any(len(arrays[key]) != points for key in ("labels", "names", "ends")) or len(arrays["queries"]) != len(arrays["neighbours"]):
        raise _Invalid("the shapes of the arrays do not match")
    if "scores" in arrays and arrays["scores"].shape != arrays["neighbours"].shape:
        raise _Invalid("`scores` and `neighbours` have different shapes")
    if len({len(arrays.get(key, ())) for key in _LATER if key.startswith("class_")}) > 1:
        raise _Invalid("the results of the classes have different lengths")
    for key in ("queries", "neighbours"):
        if arrays[key].size and not 0 <= arrays[key].min() <= arrays[key].max() < points:
            raise _Invalid(f"`{key}` has indices out of range")
    ends = arrays["ends"]
    if (np.diff(ends) < 0).any() or (points and not 0 <= ends[0] <= ends[-1] <= len(arrays["thumbnails"])):
        raise _Invalid("`ends` has indices out of range")
    if not all(np.isfinite(arrays[key]).all() for key in ("embeddings", "spectrum")):
        raise _Invalid("`embeddings` or `spectrum` has values that are not finite")
    return arrays


def _labels(path: Path) -> dict[str, dict[str, str]]:
    found = _object(path)
    return {run_id: {axis: str(value) for axis, value in names.items()} for run_id, names in found.items() if isinstance(names, dict)}
