"""Runs on datasets that they were not trained on: `unimetric transfer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unimetric.analysis.evaluate import evaluate
from unimetric.config import check_part, load
from unimetric.errors import UnimetricError
from unimetric.images.loading import Progress


def transfer(
    runs: Sequence[str | Path],
    datasets: Sequence[str],
    *,
    metrics: Sequence[str] = (),
    progress: Progress | None = None,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Measure each run on the usual test classes of each dataset (Milbich et al. 2021, supplement C).

    Args:
        runs: run folders.
        datasets: parts of `datasets/`.
        metrics: parts of `metrics/`; default each run's own.
        progress: called with (done, all) of the pictures of one dataset.
        overrides: settings that may differ from training, such as `device`.

    Returns:
        one dictionary a run and dataset: `run`, `trained_on`, `tested_on`, and the metrics.
    """
    if not runs or not datasets:
        raise UnimetricError("nothing to transfer", "name run folders, and datasets with `--to`")
    if "dataset" in overrides:
        raise UnimetricError(f"`dataset={overrides['dataset']}`: the datasets to test on are named by `--to`", "leave it out")
    for dataset in datasets:
        check_part("datasets", dataset, "transfer", "--to")
    rows = []
    for run, trained_on in [(run, load(Path(run) / "config.toml").dataset) for run in runs]:  # all of them, before the first picture
        for dataset in datasets:
            numbers = evaluate(run, metrics=list(metrics), progress=progress, **({"split": "standard"} | overrides | {"dataset": dataset}))
            rows.append({"run": str(run), "trained_on": trained_on, "tested_on": dataset, **numbers})
    return rows
