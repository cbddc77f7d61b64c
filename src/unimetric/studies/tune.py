"""Hyperparameter search with Optuna, scored on held-out validation classes."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from unimetric.config import RunConfig, from_settings, load, score
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.folder import read_done, study_runs
from unimetric.spec import bind, parse, text_of
from unimetric.studies.grid import Run
from unimetric.studies.local import study
from unimetric.studies.ranges import filled, read_search

_log = logging.getLogger("unimetric")


def tune(path: str | Path, out: str | Path, /, *, trials: int = 20, seed: int = 0, **overrides: Any) -> tuple[float, dict[str, Any]]:
    """Search hyperparameters with Optuna's TPE sampler, and write `OUT/best.toml`.

    The score of a trial is the run's first metric on its validation classes. A split without validation classes raises an error,
    because test classes must not select hyperparameters. Finished runs are reused by their id, so an interrupted search resumes.

    Args:
        path: TOML file of a run with `{name}` in some settings, and a table `[search]` with a range per name: `{low, high}`,
            optionally with `log = true` or `whole = true`, or `{choices = [...]}`.
        out: Folder of the run folders.
        trials: Total number of trials, including finished ones. If more are finished, all of them count.
        seed: Seed of the search.
        overrides: Settings by name.

    Returns:
        The best score, negated if lower is better, and its hyperparameters.
    """
    optuna = _optuna()
    settings, ranges = read_search(path, **overrides)
    first = {name: limits["choices"][0] if "choices" in limits else limits["low"] for name, limits in ranges.items()}
    split = filled(settings, first).get("split", "standard")
    if not has_validation(str(split)):
        raise UnimetricError(f"{path}: the split `{split}` has no validation classes", "use `split = 'standard(validation=0.2)'`")
    for name, limits in ranges.items():  # check every choice and the ends of every range before the first trial
        for value in limits.get("choices") or (limits["low"], limits["high"]):
            from_settings(filled(settings, first | {name: value}), str(path))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    folder = Path(out)

    # With one seed and one trial at a time, the sampler proposes the same settings again after an interruption.
    for number in range(max(trials, len(study_runs(folder)))):
        trial = search.ask()
        values = {name: _suggest(trial, name, limits) for name, limits in ranges.items()}
        config = from_settings(filled(settings, values), str(path))
        if number >= trials and not (folder / config.run_id / "done").exists():
            break
        states = study([Run(config, {name: _short(value) for name, value in values.items()})], folder, quiet=False)
        if states[config.run_id] == "done":
            search.tell(trial, trial_score(folder / config.run_id))
        else:
            search.tell(trial, state=optuna.trial.TrialState.FAIL)
    if not [trial for trial in search.trials if trial.state == optuna.trial.TrialState.COMPLETE]:
        raise UnimetricError(f"{path}: every trial failed", f"see {folder / 'logs'}")
    best = from_settings(filled(settings, search.best_params), str(path))
    _warn_of_better(folder, best, search.best_value)
    write_text(folder / "best.toml", best.dump())
    if read_done(folder / best.run_id)["epoch"] == 0:
        _log.warning("the best trial is best before training, so its settings changed nothing; train longer, or search other ranges")
    return search.best_value, search.best_params


def _warn_of_better(folder: Path, best: RunConfig, value: float) -> None:
    """Warn if `best.toml` holds a better trial of another search, which it will lose."""
    with suppress(UnimetricError):
        before = load(folder / "best.toml")
        same = all(getattr(before, key) == getattr(best, key) for key in ("dataset", "split", "metrics"))
        if same and (found := trial_score(folder / before.run_id)) > value:
            _log.warning(
                "%s: replaces a better trial of another search, %.4f; its settings are in %s",
                folder / "best.toml",
                found,
                folder / before.run_id / "config.toml",
            )


def trial_score(folder: Path) -> float:
    """Return the score of a finished run: its first metric on the validation classes.

    The score is that of the best epoch, negated if lower is better.
    """
    line = read_done(folder)
    if not any(key.startswith("validation/") for key in line):
        raise UnimetricError(f"{folder}: has no results on validation classes", "use `split = 'standard(validation=0.2)'`")
    return score(load(folder / "config.toml").metrics[:1], line, "validation")


def has_validation(text: str) -> bool:
    """Return whether the spec string of a split holds out validation classes.

    >>> has_validation("standard(validation=0.2)"), has_validation("standard(validation=0)"), has_validation("standard")
    (True, False, False)
    """
    return bool(parse(text).named.get("validation"))


def without_validation(text: str) -> str:
    """Remove the validation classes from the spec string of a split.

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
        raise UnimetricError("`unimetric tune` requires Optuna, which is not installed", "pip install 'unimetric[tune]'") from None
