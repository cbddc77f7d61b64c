"""Evaluate runs on datasets that they were not trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.analysis.evaluate import evaluate
from unimetric.config import check_part
from unimetric.errors import UnimetricError
from unimetric.images.loading import Progress
from unimetric.images.table import Table
from unimetric.runs.folder import expand_studies, load_settings
from unimetric.runs.record import describe_images, read_images


def transfer(
    runs: Sequence[str | Path],
    datasets: Sequence[str],
    *,
    metrics: Sequence[str] = (),
    progress: Progress | None = None,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Evaluate each run on the standard test classes of each dataset.

    Logs a warning if a run was trained on some of these images.

    Reference:
        Supplement C of Characterizing generalization under out-of-distribution shifts (Milbich et al., NeurIPS 2021).

    Args:
        runs: Run folders, and folders of studies.
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
    configs = {run: load_settings(run) for run in expand_studies(runs)}  # checks all runs before the first image is read
    for run, config in configs.items():
        for dataset in datasets:
            chosen = {"split": "standard"} | overrides | {"dataset": dataset}
            check = partial(_warn_of_training_images, run, dataset)
            numbers = evaluate(run, metrics=list(metrics), check=check, progress=progress, **chosen)
            rows.append({"run": str(run), "trained_on": config.dataset, "tested_on": dataset, **numbers})
    return rows


def _warn_of_training_images(run: str | Path, dataset: str, table: Table, rows: np.ndarray) -> None:
    """Log a warning if some rows of a dataset are in the training images of `data.json`.

    Name, size and class of the images are compared.
    """
    trained = {image.without_time for image in read_images(Path(run)).get("train", [])}
    if not trained:
        return
    found = describe_images(table, {"test": rows})["test"]
    count = sum(image.without_time in trained for image in found)
    if count:
        message = "%s: was trained on %d of the %d test images of `%s`, so its values there are too good"
        logging.getLogger("unimetric").warning(message, run, count, len(found), dataset)
