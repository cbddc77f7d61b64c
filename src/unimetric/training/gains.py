"""Gain over the untrained network, on the test classes and on other datasets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.runs.embed import open_images, space_of
from unimetric.runs.weights import read_tensors
from unimetric.training.progress import Progress
from unimetric.training.scores import compare_scores, score_of
from unimetric.training.state import TrainingState, embed_rows, embed_with_features, trained_loss


def score_watched(state: TrainingState, *, raw: bool) -> dict[str, dict[str, Any]]:
    """Score the run's network on each of the other datasets of the settings.

    Args:
        state: State of the run.
        raw: Whether to use the features of the raw backbone instead of the embeddings. Only before the first step.

    Returns:
        Scores of the first metric by dataset.
    """
    config = state.config
    found: dict[str, dict[str, Any]] = {}
    for text, table in state.watched.items():
        report = partial(state.display.step, "reading images")
        loader, rows = open_images(state.fabric, config, state.bare, table, progress=report), np.arange(len(table))
        if raw:
            space = space_of(embed_with_features(state, rows, loader=loader)[1], table, rows)
        else:
            space = space_of(embed_rows(state, rows, loader=loader), table, rows, loss=trained_loss(state), geometry=config.geometry)
        found[text] = score_of(space, config.metrics[0])
    return found


def log_watched(state: TrainingState) -> dict[str, dict[str, Any]]:
    """Score and print the raw backbone on the other datasets, before the first step."""
    scores = score_watched(state, raw=True)
    for text, score in scores.items():
        state.display.line(f"untrained network on {text}: {state.config.metrics[0]} {score['value']:.4f}")
    return scores


def measure_gains(state: TrainingState, folder: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    """Return the gains of the best epoch over the untrained network. All ranks must call it.

    The untrained network is the raw backbone, without head and adapter.

    Args:
        state: State of the run after its last epoch. If there are other datasets, its weights become those of the best epoch.
        folder: Run folder.
        progress: Best epoch, and scores of the untrained network.

    Returns:
        Gains as in `compare_scores`: `test` for the run's own test classes, and one per other dataset.
    """
    assert progress.best is not None, "the last epoch is always evaluated"
    scores = {"test": progress.best.get("score") or {}}
    if state.watched:
        if progress.best["line"]["epoch"] != state.config.epochs:
            state.trained.load_state_dict(read_tensors(folder / "model.safetensors")[0])
        scores |= score_watched(state, raw=False)
    known = {name: (progress.untrained[name], score) for name, score in scores.items() if score and name in progress.untrained}
    return {name: compare_scores(before, after, state.config.metrics[0]) for name, (before, after) in known.items()}
