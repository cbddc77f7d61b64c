"""Bundles run folders into one small JSON file, from which `results/page.py` makes the page of results.

    python results/collect.py runs/a runs/b --out results/universal.json --session third --rename "shards.cub=pack(path='cub.pack')"

Of each run: the settings that differ from the defaults, every line of its log that has metrics, training seconds, pictures a second, and
what it ran on. Of a path, only the file's name is kept. Runs that are in the file already stay; those of the same name are replaced. Unlike
`unimetric report` this takes unfinished runs too, and folders of which only settings and log were kept. A file of splits, which
`unimetric split` wrote, is taken alone: its distances are kept, its classes are not.

    python results/collect.py cars_splits.json --out results/splits_cars196.json --session third
"""

from __future__ import annotations

import argparse
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

#: A path that leads somewhere on one machine only, up to the quote that ends it.
_PATH = re.compile(r"(?<![\w.)])(?:~\w*|\.\.)?/(?:[^'\"]*/)?([^'\"/]*)")


def scrubbed(value: Any, renames: dict[str, str]) -> Any:
    """A setting without machine paths.

    Args:
        value: a setting, as `config.toml` has it.
        renames: whole texts to write differently, such as a dataset that is a function outside the project.

    >>> scrubbed("timm(name='resnet50', weights='/data/x.safetensors', stride_first=True)", {})
    "timm(name='resnet50', weights='x.safetensors', stride_first=True)"
    """
    if isinstance(value, list):
        return [scrubbed(item, renames) for item in value]
    if not isinstance(value, str):
        return value
    return renames[value] if value in renames else _PATH.sub(r"\1", value)


def short(value: Any) -> Any:
    """A number with six digits: percent with two decimals stay right."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def collect(folder: Path, renames: dict[str, str], session: str) -> dict[str, Any]:
    """What is kept of one run.

    Args:
        folder: with `config.toml` and `metrics.jsonl`; `environment.json`, `adapt_*_shots.json` and `train.json`, which
            `unimetric evaluate RUN --part train --out RUN/train.json` writes, are read where they are.
        renames: as in `scrubbed`.
        session: when it was made.
    """
    try:
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise UnimetricError(f"{folder}: {Path(error.filename).name} is absent", "name folders that `unimetric train` filled") from None
    except ValueError as error:
        raise UnimetricError(f"{folder}: cannot be read: {error}", "mend it or leave it out") from None
    defaults = asdict(RunConfig()) | {"metrics": list(RunConfig().metrics)}
    told = {key: value for key, value in settings.items() if key not in NO_RESULT and value != defaults.get(key)}
    measured = [{key: short(value) for key, value in line.items() if key == "epoch" or _is_metric(key)} for line in lines]
    trained = [line for line in lines if "pictures_per_second" in line]
    run: dict[str, Any] = {"session": session, "settings": {key: scrubbed(value, renames) for key, value in told.items()}}
    environment = _table(folder / "environment.json")
    run |= {key: environment[key] for key in ("device", "torch") if key in environment}
    if trained:
        run |= {
            "epochs": len(trained),
            "seconds": round(sum(line["seconds"] for line in trained), 1),
            "pictures_per_second": round(statistics.median(line["pictures_per_second"] for line in trained)),
        }
    for path in sorted(folder.glob("adapt_*_shots.json")):
        found = _table(path)
        summary = {f"few_shot/{found['shots']}/{key}": [short(number) for number in pair] for key, pair in found["summary"].items()}
        run["few_shot"] = run.get("few_shot", {}) | summary | {f"few_shot/{found['shots']}/episodes": len(found["episodes"])}
    trained_on = _table(folder / "train.json")
    if trained_on:
        run["train"] = {f"train/{key}": short(value) for key, value in trained_on.items()}
    run["lines"] = [line for line in measured if len(line) > 1]
    return run


def _is_metric(key: str) -> bool:
    return key.startswith(("test/", "validation/"))


def _table(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def written(runs: dict[str, dict[str, Any]]) -> str:
    """Runs as JSON, one evaluated epoch a line."""

    def one(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    texts = []
    for name, run in sorted(runs.items()):
        head = "".join(f"   {one(key)}: {one(value)},\n" for key, value in run.items() if key != "lines")
        lines = ",\n".join(f"    {one(line)}" for line in run["lines"])
        texts.append(f"  {one(name)}: {{\n{head}" + (f'   "lines": [\n{lines}\n   ]' if lines else '   "lines": []') + "\n  }")
    return '{\n "runs": {\n' + ",\n".join(texts) + "\n }\n}\n"


def distances(path: Path, session: str) -> str:
    """A file of splits without its classes, as JSON, one step of the sequence a line.

    Args:
        path: what `unimetric split` wrote.
        session: when it was made.
    """
    found = _table(path)
    head = {"session": session} | {key: short(found[key]) for key in ("format", "pictures", "no_shift", "plateau")}
    head["splits"] = {number: {"key": step["key"], "distance": short(step["distance"])} for number, step in found["splits"].items()}
    steps = [{"key": step["key"], "distance": short(step["distance"])} for step in found["history"]]
    texts = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return "{\n" + texts + ' "history": [\n' + ",\n".join(f"  {json.dumps(step)}" for step in steps) + "\n ]\n}\n"


def main(words: list[str] | None = None) -> None:
    """Read the folders that are named, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, made or added to")
    parser.add_argument("--session", default="", help="when the runs were made, such as `third`")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="write this value of a setting differently")
    given = parser.parse_args(words)
    renames = dict(word.split("=", 1) for word in given.rename if "=" in word)
    if len(renames) < len(given.rename):
        raise SystemExit("error: --rename needs OLD=NEW, such as \"shards.cub=pack(path='cub.pack')\"")
    if [path.suffix for path in given.folders] == [".json"]:
        write_text(given.out, distances(given.folders[0], given.session))
        return
    runs = _table(given.out).get("runs", {})
    try:
        for folder in given.folders:
            runs[folder.resolve().name] = collect(folder, renames, given.session)
    except UnimetricError as error:
        raise SystemExit(f"error: {error}") from None
    write_text(given.out, written(runs))
    print(f"{given.out}: {len(runs)} runs, {given.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
