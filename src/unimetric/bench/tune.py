"""Search for good settings with Optuna, judged on validation classes that are taken from the training classes."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

from unimetric.bench.grid import Run, expand, read_settings
from unimetric.bench.study import study
from unimetric.config import from_settings, load, score
from unimetric.engine.log import read_done
from unimetric.errors import UnimetricError, closest
from unimetric.files import write_text
from unimetric.spec import bind, parse, text_of

_PLACE = re.compile(r"\{(\w+)\}")


def tune(path: str | Path, out: str | Path, /, *, trials: int = 20, seed: int = 0, **overrides: Any) -> tuple[float, dict[str, Any]]:
    """Try settings, the better ones' neighbourhood more and more often (Optuna's TPE sampler), and write the best to `OUT/best.toml`.

    The value of a trial is the run's first metric on its validation classes. A search whose split has none is refused: test classes must
    not choose settings. Runs are kept by their id, so that an interrupted search goes on and repeats nothing.

    Args:
        path: a run's TOML file with `{name}` in some texts, and a table `[search]` that gives each name `{low, high}`, with `log = true`
            or `whole = true` if wished, or `{choices = [...]}`.
        out: where run folders go.
        trials: how many in all.
        seed: of the search.
        overrides: settings by name.

    Returns:
        the best value, with a minus where lower is better, and what it was found at.
    """
    optuna = _optuna()
    settings, ranges = read_search(path, **overrides)
    if not re.search(r"validation\s*=\s*(?!0\b(?!\.)|0\.0*\b(?!\d)|False)", str(settings.get("split", "standard"))):
        raise UnimetricError(
            f"{path}: the split `{settings.get('split', 'standard')}` has no validation classes to choose settings on",
            "write `split = 'standard(validation=0.2)'`",
        )
    first = {name: limits["choices"][0] if "choices" in limits else limits["low"] for name, limits in ranges.items()}
    for name, limits in ranges.items():  # all of them now, or a misspelt one would end the search when its turn comes
        for value in limits.get("choices", ()):
            from_settings(filled(settings, first | {name: value}), str(path))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    place = Path(out)

    # Asked one after another from the same seed, the sampler proposes the same settings again after an interruption.
    for _ in range(trials):
        trial = search.ask()
        values = {name: _suggest(trial, name, limits) for name, limits in ranges.items()}
        config = from_settings(filled(settings, values), str(path))
        states = study([Run(config, {name: _short(value) for name, value in values.items()})], place, quiet=False)
        if states[config.run_id] == "done":
            search.tell(trial, judged(place / config.run_id))
        else:
            search.tell(trial, state=optuna.trial.TrialState.FAIL)
    if not [trial for trial in search.trials if trial.state == optuna.trial.TrialState.COMPLETE]:
        raise UnimetricError(f"{path}: every trial failed", f"see {place / 'logs'}")
    best = from_settings(filled(settings, search.best_params), str(path))
    write_text(place / "best.toml", best.dump())
    return search.best_value, search.best_params


def judged(folder: Path) -> float:
    """The first metric of a finished run on its validation classes, at its best epoch; with a minus where lower is better."""
    line = read_done(folder)
    if not any(key.startswith("validation/") for key in line):
        raise UnimetricError(f"{folder}: was not measured on validation classes", "write `split = 'standard(validation=0.2)'`")
    return score(load(folder / "config.toml").metrics[:1], line, "validation")


def without_validation(text: str) -> str:
    """A split whose validation classes are trained on, too: what the settings that were found are for.

    >>> without_validation("standard(validation=0.2)")
    'standard'
    >>> without_validation("ood(path='splits.json', split=9, validation=0.25)")
    "ood(path='splits.json', split=9)"
    """
    return text_of(parse(text).name, {key: value for key, value in bind("splits", text)[1].items() if key != "validation"})


def read_search(path: str | Path, /, **overrides: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings with names in their texts, and the range of each name; they must be the same names."""
    settings = read_settings(path) | overrides
    ranges = settings.pop("search", {})
    if not isinstance(ranges, dict):
        raise UnimetricError(f"{path}: `search` is no table", "write `[search]` with `name = {low = 0.1, high = 1.0}`")
    wanted = {name for value in settings.values() for name in _names(value)}
    if not wanted:
        raise UnimetricError(
            f"{path}: nothing to search for", "write `{name}` in a text and `[search]` with `name = {low = 0.1, high = 1.0}`"
        )
    for name in sorted(wanted ^ set(ranges)):
        known = ranges if name in wanted else wanted
        raise UnimetricError(f"{path}: `{name}` is in {'the settings' if name in wanted else '[search]'} only", closest(name, known))
    for name, limits in ranges.items():
        if not _is_range(limits):
            raise UnimetricError(f"{path}: the range of `{name}` cannot be read", "write `{low = 0.1, high = 1.0}` or `{choices = [1, 2]}`")
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


def corners(path: str | Path, /, **overrides: Any) -> list[Run]:
    """Return the runs at the ends of the ranges of a search, for a check of the ranges."""
    settings, ranges = read_search(path, **overrides)
    ends = []
    for which, key in ((0, "low"), (-1, "high")):
        ends.append({name: limits["choices"][which] if "choices" in limits else limits[key] for name, limits in ranges.items()})
    return [run for values in ends for run in expand(filled(settings, values), str(path))]


def _names(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _names(item)]
    return _PLACE.findall(value) if isinstance(value, str) else []


def filled(settings: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Settings with values in the place of names. A text that is nothing but a name becomes the value itself.

    >>> filled({"loss": "margin(beta={beta})", "epochs": "{epochs}"}, {"beta": 0.6, "epochs": 3})
    {'loss': 'margin(beta=0.6)', 'epochs': 3}
    """

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str):
            return value
        alone = _PLACE.fullmatch(value)
        return values[alone[1]] if alone else _PLACE.sub(lambda match: str(values[match[1]]), value)

    return {key: fill(value) for key, value in settings.items()}


def _suggest(trial: Any, name: str, limits: dict[str, Any]) -> Any:
    if "choices" in limits:
        return trial.suggest_categorical(name, limits["choices"])
    if limits.get("whole"):
        return trial.suggest_int(name, limits["low"], limits["high"], log=limits.get("log", False))
    return trial.suggest_float(name, limits["low"], limits["high"], log=limits.get("log", False))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ModuleNotFoundError:
        raise UnimetricError("`unimetric tune` needs Optuna, which is not installed", "pip install 'unimetric[tune]'") from None
