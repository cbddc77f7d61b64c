"""Add run folders to a JSON file of results, from which `results/page.py` writes the results page.

    python results/collect.py runs/margin runs/diva --into results/oodml.json --commit 1a2b3c4 \
        --device "NVIDIA H200" --command "unimetric train diva_cars196"

A run is stored with its date, commit, device, command, the settings that differ from the defaults, its
training time and speed, and its whole learning curve. Machine paths are reduced to file names. The name of
a run is the folder's name and its seed; a stored run of the same name is replaced. Unfinished runs are
accepted. A file of `unimetric split` is reduced to its distances:

    python results/collect.py cars_splits.json --into results/splits_cars196.json --commit 1a2b3c4 --command "..."
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unimetric.config import NO_RESULT, RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import write_text

#: An absolute, home or parent path, up to the quote that ends it.
_PATH = re.compile(r"(?<![\w.)])(?:~\w*|\.\.)?/(?:[^'\"]*/)?([^'\"/]*)")
#: Keys of metric values: `test/recall(k=1)`, and for a variant of the head `test weights=1,1,1,1/recall(k=1)`.
_METRIC = re.compile(r"(test|validation|train)( [^/]*)?/")


def scrub(value: Any, renames: dict[str, str]) -> Any:
    """Remove machine paths from a setting.

    Args:
        value: Setting, as in `config.toml`.
        renames: Replacements for whole settings, such as a dataset that is a function outside the project.

    >>> scrub("timm(name='resnet50', weights='/data/x.safetensors', stride_first=True)", {})
    "timm(name='resnet50', weights='x.safetensors', stride_first=True)"
    """
    if isinstance(value, list):
        return [scrub(item, renames) for item in value]
    if not isinstance(value, str):
        return value
    return renames[value] if value in renames else _PATH.sub(r"\1", value)


def shorten(value: Any) -> Any:
    """Round a number to six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def collect(folder: Path, renames: dict[str, str], source: dict[str, str]) -> dict[str, Any]:
    """Read one run.

    Args:
        folder: Run folder with `config.toml` and `metrics.jsonl`. `environment.json`, `adapt_*_shots.json` and `train.json`
            (of `unimetric evaluate RUN --part train --out RUN/train.json`) are read if they exist.
        renames: As in `scrub`.
        source: Date, commit, device and command. An empty device is read from `environment.json`.
    """
    try:
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise UnimetricError(f"{folder}: {Path(error.filename).name} is missing", "name folders that `unimetric train` wrote") from None
    except ValueError as error:
        raise UnimetricError(f"{folder}: cannot be read: {error}", "fix the file or skip the folder") from None
    defaults = asdict(RunConfig()) | {"metrics": list(RunConfig().metrics)}
    changed = {key: value for key, value in settings.items() if key not in NO_RESULT and value != defaults.get(key)}
    environment = _read(folder / "environment.json")
    run: dict[str, Any] = {key: value or environment.get(key, "") for key, value in source.items()}
    run |= {"torch": environment.get("torch", ""), "settings": {key: scrub(value, renames) for key, value in changed.items()}}
    trained = [line for line in lines if "pictures_per_second" in line]
    run["epochs"] = len(trained)
    if trained:
        run["seconds"] = round(sum(line["seconds"] for line in trained), 1)
        run["pictures_per_second"] = round(statistics.median(line["pictures_per_second"] for line in trained))
    for path in sorted(folder.glob("adapt_*_shots.json")):
        found = _read(path)
        values = {f"few_shot/{found['shots']}/{key}": [shorten(number) for number in pair] for key, pair in found["summary"].items()}
        run["few_shot"] = run.get("few_shot", {}) | values | {f"few_shot/{found['shots']}/episodes": len(found["episodes"])}
    if (folder / "train.json").exists():
        run["train"] = {f"train/{key}": shorten(value) for key, value in _read(folder / "train.json").items()}
    run["curve"] = as_columns([line for line in lines if any(_METRIC.match(key) for key in line)])
    return run


def as_columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn the evaluated lines of a log into one list per metric, with None where a line lacks it."""
    keys = dict.fromkeys(key for line in lines for key in line if key == "epoch" or _METRIC.match(key))
    return {key: [shorten(line.get(key)) for line in lines] for key in keys}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def format_runs(runs: dict[str, dict[str, Any]]) -> str:
    """Format runs as JSON with one key per line, and one metric of the learning curve per line."""

    def as_object(table: dict[str, Any], indent: str, nested: str = "") -> str:
        texts = []
        for key, value in table.items():
            text = as_object(value, f"{indent} ") if key == nested and value else json.dumps(value, ensure_ascii=False)
            texts.append(f"{indent} {json.dumps(key, ensure_ascii=False)}: {text}")
        return "{\n" + ",\n".join(texts) + f"\n{indent}}}"

    texts = [f"  {json.dumps(name)}: {as_object(run, '  ', 'curve')}" for name, run in sorted(runs.items())]
    return '{\n "runs": {\n' + ",\n".join(texts) + "\n }\n}\n"


def format_distances(path: Path, source: dict[str, str]) -> str:
    """Format a file of splits without its classes, as JSON with one step of the sequence per line.

    Args:
        path: File that `unimetric split` wrote.
        source: Date, commit, device and command.
    """
    found = _read(path)
    head = source | {key: shorten(found[key]) for key in ("format", "pictures", "no_shift", "plateau")}
    head["splits"] = {number: {"key": step["key"], "distance": shorten(step["distance"])} for number, step in found["splits"].items()}
    steps = [{"key": step["key"], "distance": shorten(step["distance"])} for step in found["history"]]
    texts = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return "{\n" + texts + ' "history": [\n' + ",\n".join(f"  {json.dumps(step)}" for step in steps) + "\n ]\n}\n"


def main(words: list[str] | None = None) -> None:
    """Read the given folders and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="run folders, or one file of `unimetric split`")
    parser.add_argument("--into", "--out", type=Path, required=True, help="JSON file to create or extend")
    parser.add_argument("--commit", required=True, help="commit of the code that ran")
    parser.add_argument("--command", required=True, help="command that made the runs; settings of single runs are stored anyway")
    parser.add_argument("--device", default="", help="device (default: from environment.json)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date of the runs (default: today)")
    parser.add_argument("--prefix", default="", help="text before the name of each run, such as `ood200_`")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="replacement for a setting's value")
    given = parser.parse_args(words)
    renames = dict(word.split("=", 1) for word in given.rename if "=" in word)
    if len(renames) < len(given.rename):
        raise SystemExit("error: `--rename` must be OLD=NEW, such as \"shards.cub=pack(path='cub.pack')\"")
    command = " ".join(scrub(word, renames) for word in given.command.split(" "))
    source = {"date": given.date, "commit": given.commit, "device": given.device, "command": command}
    if [path.suffix for path in given.folders] == [".json"]:
        write_text(given.into, format_distances(given.folders[0], source))
        return
    runs = _read(given.into).get("runs", {})
    try:
        for folder in given.folders:
            run = collect(folder, renames, source)
            seed = f"_{run['settings'].get('seed', 0)}"
            runs[given.prefix + folder.resolve().name.removesuffix(seed) + seed] = run
    except UnimetricError as error:
        raise SystemExit(f"error: {error}") from None
    write_text(given.into, format_runs(runs))
    print(f"{given.into}: {len(runs)} runs, {given.into.stat().st_size / 1024:.0f} KiB; run `make results`")


if __name__ == "__main__":
    main()
