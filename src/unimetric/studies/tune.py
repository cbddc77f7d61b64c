"""Search for good settings with Optuna, judged on validation classes that are taken from the training classes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from unimetric.config import from_settings, load, score
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.folder import read_done
from unimetric.spec import bind, parse, text_of
from unimetric.studies.grid import Run
from unimetric.studies.local import study
from unimetric.studies.ranges import filled, read_search


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
            search.tell(trial, trial_score(place / config.run_id))
        else:
            search.tell(trial, state=optuna.trial.TrialState.FAIL)
    if not [trial for trial in search.trials if trial.state == optuna.trial.TrialState.COMPLETE]:
        raise UnimetricError(f"{path}: every trial failed", f"see {place / 'logs'}")
    best = from_settings(filled(settings, search.best_params), str(path))
    write_text(place / "best.toml", best.dump())
    return search.best_value, search.best_params


def trial_score(folder: Path) -> float:
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
