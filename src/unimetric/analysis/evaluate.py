"""Evaluate runs, models that are not fine-tuned, and embeddings made elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.config import RunConfig, check_part, from_settings
from unimetric.errors import UnimetricError
from unimetric.files import read_arrays, write_arrays
from unimetric.geometry.rerank import check_rerank, reranked
from unimetric.geometry.space import Space
from unimetric.images.loading import Progress
from unimetric.metrics import interval, measure
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all, space_of
from unimetric.runs.folder import open_run, overridden
from unimetric.runs.model import build_model, loss_with_geometry, place
from unimetric.runs.rows import read_table, readable


def evaluate(
    run: str | Path | RunConfig,
    *,
    metrics: list[str] | tuple[str, ...] = (),
    part: str = "test",
    rerank: bool = False,
    level: float = 0.0,
    save: str | Path | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, float]:
    """Evaluate a run on its test classes, or a model that is not fine-tuned.

    Args:
        run: Run folder, or settings. With settings, the model has its initial weights.
        metrics: Metric spec strings. Defaults to those of the run.
        part: Rows of the split: `test`, `validation` or `train`.
        rerank: Whether neighbors are re-ranked by k-reciprocal encoding first.
        level: Level of confidence intervals, such as 0.95; 0 for none.
        save: Path of an `.npz` file for embeddings and labels.
        progress: Callback with (done, all).
        overrides: Settings that may differ from training, such as `dataset`, `device`, or test-time
            arguments of the head: `head="diva(weights=(0.5, 1.5, 1.5, 1.5))"`. With settings, any of them.

    Returns:
        Metric values by spec string.
    """
    check_metrics(metrics, level)
    if save is not None and not Path(save).name:
        raise UnimetricError(f"`--save` must be a file, got the folder {save}", "use `--save embeddings.npz`")
    if isinstance(run, RunConfig):
        config = from_settings(asdict(run) | overrides)
        model = build_model(config)
    else:
        config, model = open_run(run, backbone=overrides.get("backbone", ""), head=overrides.get("head", ""))
        config = overridden(config, overrides, run)
    loss = loss_with_geometry(config, model.dim)
    fabric = open_fabric(config)
    table, split = read_table(config)
    if part not in ("test", "validation", "train") or not len(getattr(split, part)):
        raise UnimetricError(f"the split has no `{part}` rows", "use test, train, or validation with `split=standard(validation=0.2)`")
    rows, _ = readable(config, table, getattr(split, part), progress=progress)
    if rerank:
        check_rerank(len(rows))
    embeddings = embed_all(fabric, config, model, table.take(rows), progress=progress)
    if save is not None:
        file = Path(save).with_name(Path(save).name.removesuffix(".npz") + ".npz")
        kept = {"labels": table.labels[rows], "query": table.query[rows], "gallery": table.gallery[rows]}
        write_arrays(file, embeddings=embeddings.cpu().numpy(), **kept)
    space = space_of(embeddings, table, rows, loss=loss, geometry=config.geometry)
    own = (config.train_metrics if part == "train" else []) or config.test_metrics
    return numbers_of(space, list(metrics) or own, rerank=rerank, level=level)


def check_metrics(metrics: Sequence[str], level: float = 0.0) -> None:
    """Check metrics and level before any image is embedded."""
    for text in metrics:
        check_part("metrics", text, "evaluate", "metrics")
    if not 0 <= level < 1:
        raise UnimetricError(f"`level` must be at least 0 and below 1, got {level}", "use 0.95, or 0 for no intervals")


def numbers_of(space: Space, metrics: list[str], *, rerank: bool = False, level: float = 0.0) -> dict[str, float]:
    """Compute metrics of a space.

    With a level, a metric that is a mean over queries also has the ends of its confidence interval, as `NAME/from` and `NAME/to`.

    Args:
        space: Embeddings and labels.
        metrics: Metric spec strings.
        rerank: Whether neighbors are re-ranked first.
        level: Level of confidence intervals; 0 for none.

    Returns:
        Metric values by spec string.
    """
    space = reranked(space) if rerank else space
    numbers = measure(space, metrics)
    for text in metrics if level else []:
        with contextlib.suppress(UnimetricError):  # a metric of the whole space has no interval
            numbers[f"{text}/from"], numbers[f"{text}/to"] = interval(space, text, level=level)
    return numbers


def check_rows(path: str | Path, embeddings: np.ndarray) -> None:
    """Raise an error unless the embeddings of a file are a table of real numbers."""
    if embeddings.dtype.kind not in "fiub" or embeddings.ndim != 2 or not embeddings.size:
        raise UnimetricError(
            f"{path}: `embeddings` must be real numbers of shape (N, D), got {embeddings.dtype} {embeddings.shape}",
            "save one row per image",
        )


def evaluate_file(
    path: str | Path, *, metrics: list[str] | tuple[str, ...] = (), rerank: bool = False, level: float = 0.0, geometry: str = ""
) -> dict[str, float]:
    """Evaluate saved embeddings.

    Args:
        path: `.npz` file with `embeddings` (N, D), `labels` (N,), and optionally the masks `query` and `gallery` (N,).
        metrics: Metric spec strings. Defaults to recall@1.
        rerank: Whether neighbors are re-ranked by k-reciprocal encoding first.
        level: Level of confidence intervals, such as 0.95; 0 for none.
        geometry: `cosine` (default), `euclidean` or `inner`.

    Returns:
        Metric values by spec string.
    """
    check_metrics(metrics, level)
    arrays = read_arrays(Path(path), "save it with numpy.savez(path, embeddings=..., labels=...), or name a run folder or a backbone")
    for key, dimensions in (("embeddings", 2), ("labels", 1)):
        if key not in arrays or arrays[key].ndim != dimensions:
            raise UnimetricError(
                f"{path}: must contain `{key}` with {dimensions} dimension(s)", f"the file contains: {', '.join(arrays) or 'nothing'}"
            )
    if len(arrays["embeddings"]) != len(arrays["labels"]):
        raise UnimetricError(f"{path}: {len(arrays['embeddings'])} embeddings but {len(arrays['labels'])} labels", "save one label per row")
    check_rows(path, arrays["embeddings"])
    for key in ("query", "gallery"):
        if key in arrays and arrays[key].dtype != bool:
            raise UnimetricError(
                f"{path}: `{key}` must be bool, got {arrays[key].dtype}", f"save a mask: `{key}=np.isin(np.arange(N), rows)`"
            )
    if (arrays["labels"] != arrays["labels"]).any():  # NaN is not equal to itself
        raise UnimetricError(f"{path}: some `labels` are not a number", "remove the rows without a label")
    labels = np.unique(arrays["labels"], return_inverse=True)[1]  # labels may be strings
    embeddings = torch.from_numpy(arrays["embeddings"].astype(np.float32))  # from any byte order
    points, options = place(embeddings, None, geometry)
    space = Space(points, torch.from_numpy(labels), query=arrays.get("query"), gallery=arrays.get("gallery"), **options)
    return numbers_of(space, list(metrics or ("recall(k=1)",)), rerank=rerank, level=level)
