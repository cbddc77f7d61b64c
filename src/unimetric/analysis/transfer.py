"""Evaluate runs on datasets that they were not trained on."""

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
    """Evaluate each run on the standard test classes of each dataset.

    Reference:
        Supplement C of Characterizing generalization under out-of-distribution shifts (Milbich et al., NeurIPS 2021).

    Args:
        runs: Run folders.
        datasets: Dataset spec strings.
        metrics: Metric spec strings. Defaults to those of each run.
        progress: Callback with (done, all) for the images of one dataset.
        overrides: Settings that may differ from training, such as `device`.

    Returns:
        One dictionary per run and dataset: `run`, `trained_on`, `tested_on`, and the metrics.
    """
    if not runs or not datasets:
        raise UnimetricError("`transfer` requires at least one run and one dataset", "name run folders, and datasets with `--to`")
    if "dataset" in overrides:
        raise UnimetricError(f"`--to` sets the dataset, got `dataset={overrides['dataset']}`", "remove the setting")
    for dataset in datasets:
        check_part("datasets", dataset, "transfer", "--to")
    rows = []
    for run, trained_on in [
        (run, load(Path(run) / "config.toml").dataset) for run in runs
    ]:  # check all runs before the first image is read
        for dataset in datasets:
            numbers = evaluate(run, metrics=list(metrics), progress=progress, **({"split": "standard"} | overrides | {"dataset": dataset}))
            rows.append({"run": str(run), "trained_on": trained_on, "tested_on": dataset, **numbers})
    return rows
