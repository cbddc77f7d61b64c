"""Evaluate runs, models that are not fine-tuned, and embeddings made elsewhere."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unimetric.analysis.calibrate import check_threshold
from unimetric.analysis.classes import results_by_class
from unimetric.analysis.compressed import check_compression, compress
from unimetric.config import RunConfig, check_part, from_settings
from unimetric.errors import UnimetricError, closest
from unimetric.files import check_writable, read_arrays, write_arrays
from unimetric.geometry.pair_scores import FEWEST
from unimetric.geometry.rerank import check_rerank, reranked
from unimetric.geometry.space import GROUP_RULES, Space
from unimetric.images.duplicates import describe_duplicates
from unimetric.images.loading import Progress
from unimetric.images.table import Table
from unimetric.metrics import check_list, interval, measure
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import check_measurable, embed_all, space_of
from unimetric.runs.exported import Exported, embed_files, format_of, open_exported
from unimetric.runs.folder import check_own_images, open_run
from unimetric.runs.model import Model, build_model, loss_with_geometry, place
from unimetric.runs.rows import read_table, readable

#: Callback with the results of each class.
PerClass = Callable[[list[dict[str, Any]]], None]


def evaluate(
    run: str | Path | RunConfig,
    *,
    metrics: list[str] | tuple[str, ...] = (),
    part: str = "test",
    rerank: bool = False,
    level: float = 0.0,
    save: str | Path | None = None,
    per_class: PerClass | None = None,
    group_rule: str = "",
    dims: Sequence[int] = (),
    precisions: Sequence[str] = (),
    duplicates: bool = False,
    check: Callable[[Table, np.ndarray], None] | None = None,
    note: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, float]:
    """Evaluate a run on its test classes, or a model that is not fine-tuned.

    Args:
        run: Run folder, exported file such as `mine.onnx`, or settings. With settings, the model has its initial weights.
        metrics: Metric spec strings. Defaults to those of the run.
        part: Rows of the split: `test`, `validation` or `train`.
        rerank: Whether neighbors are re-ranked by k-reciprocal encoding first.
        level: Level of confidence intervals, such as 0.95; 0 for none.
        save: Path of an `.npz` file for embeddings, labels, class names and paths of the images.
        per_class: Callback with the recall@1 of each class, hardest first, as in `results_by_class`.
        group_rule: Gallery images of its group that a query does not find: `class`, `group` or `none`; see
            `Space`. Defaults to the rule of the dataset.
        dims: Numbers of first dimensions to evaluate as well, as `recall(k=1)/dim=32`.
        precisions: Precisions to evaluate as well: `float16`, `int8`, `binary`; see `compress`.
        duplicates: Whether to read the training images as well, and to warn if more than 1 % of the queries have a near-duplicate there.
        check: Callback with the table of the dataset and the evaluated rows, before images are embedded.
        note: Callback with a sentence about the stored threshold of a run (`calibrate`) on its test classes.
        progress: Callback with (done, all).
        overrides: Settings that may differ from training, such as `dataset`, `device`, or test-time
            arguments of the head: `head="diva(weights=(0.5, 1.5, 1.5, 1.5))"`. With settings, any of them.

    Returns:
        Metric values by spec string.
    """
    check_metrics(metrics, level)
    check_compression(dims, precisions)
    if group_rule and group_rule not in GROUP_RULES:
        raise UnimetricError(f"unknown group rule `{group_rule}`", closest(group_rule, GROUP_RULES))
    if save is not None:
        check_writable(Path(save))
    model: Model | Exported
    if isinstance(run, RunConfig):
        config = from_settings(asdict(run) | overrides)
        model = build_model(config)
    elif format_of(run):
        config, model = open_exported(run, overrides)
    else:
        config, model = open_run(run, overrides)
    loss = loss_with_geometry(config, model.dim)
    geometry = place(torch.zeros(1, model.dim), loss, config.geometry)[1]["geometry"]
    check_compression(dims, precisions, dim=model.dim, geometry=geometry)
    fabric = open_fabric(config)
    table, split = read_table(config)
    table = replace(table, group_rule=group_rule or table.group_rule)
    if part not in ("test", "validation", "train") or not len(getattr(split, part)):
        raise UnimetricError(f"the split has no `{part}` rows", "use test, train, or validation with `split=standard(validation=0.2)`")
    rows, _ = readable(config, table, getattr(split, part), progress=progress)
    folder = None if isinstance(run, RunConfig) or isinstance(model, Exported) else run
    if folder is not None:
        check_own_images(folder, config, table, {part: rows})
    if part == "train":
        rows = np.unique(rows)  # a sampled split may repeat rows, which would match themselves
    if check is not None:
        check(table, rows)
    if rerank:
        check_rerank(len(rows))
    texts = list(metrics) or (config.train_metrics if part == "train" else []) or config.test_metrics
    check_measurable(texts, table, rows)
    if isinstance(model, Exported):
        embeddings = embed_files(model.function, table.take(rows), workers=config.workers, progress=progress)
    else:
        embeddings = embed_all(fabric, config, model, table.take(rows), progress=progress)
    names = [table.class_names[label] for label in table.labels[rows]]
    if save is not None:
        _save(Path(save), embeddings, table.take(rows), names, geometry)
    if duplicates:
        _warn(describe_duplicates(table, rows[table.query[rows]], split.train, progress=progress) if part != "train" else "")
    space = space_of(embeddings, table, rows, loss=loss, geometry=config.geometry)
    stored = model.notes.get("threshold", {}) if isinstance(model, Exported) else folder
    if note is not None and part == "test" and stored is not None and (text := check_threshold(stored, space)):
        note(text)
    numbers = numbers_of(space, texts, rerank=rerank, level=level, names=names, per_class=per_class)
    for name, smaller in compress(embeddings, dims, precisions):
        numbers |= {f"{text}/{name}": value for text, value in numbers_of(space_of(smaller, table, rows), texts, rerank=rerank).items()}
    return numbers


def _save(path: Path, embeddings: Tensor, table: Table, names: list[str], geometry: str) -> None:
    """Write embeddings and the table of their images to an `.npz` file.

    The file has their labels, roles, groups and datasets, the names and paths of the images, and the geometry and group rule of
    the evaluation.
    """
    write_arrays(
        path.with_name(path.name.removesuffix(".npz") + ".npz"),
        embeddings=embeddings.cpu().numpy(),
        labels=table.labels,
        query=table.query,
        gallery=table.gallery,
        group=table.group,
        group_rule=np.array(table.group_rule),
        dataset=np.array(table.source_names)[table.source],
        geometry=np.array(geometry),
        names=np.array(names),
        paths=np.array(table.paths),
    )


def check_metrics(metrics: Sequence[str], level: float = 0.0) -> None:
    """Check metrics and level before any image is embedded."""
    check_list(metrics)
    for text in metrics:
        check_part("metrics", text, "evaluate", "metrics")
    if not 0 <= level < 1:
        raise UnimetricError(f"`level` must be at least 0 and below 1, got {level}", "use 0.95, or 0 for no intervals")


def numbers_of(
    space: Space,
    metrics: list[str],
    *,
    rerank: bool = False,
    level: float = 0.0,
    names: Sequence[str] = (),
    per_class: PerClass | None = None,
) -> dict[str, float]:
    """Compute metrics of a space.

    With a level, a metric that is a mean over queries also has the ends of its confidence interval, as `NAME/from` and `NAME/to`, unless
    there are fewer than eight classes.

    Args:
        space: Embeddings and labels.
        metrics: Metric spec strings.
        rerank: Whether neighbors are re-ranked first.
        level: Level of confidence intervals; 0 for none.
        names: Name of the class of each row, for `per_class`.
        per_class: Callback with the recall@1 of each class, hardest first.

    Returns:
        Metric values by spec string.
    """
    if 0 < space.unmatched < space.queries:
        _warn(_describe_unmatched(space))
    space = reranked(space) if rerank else space
    numbers = measure(space, metrics)
    if level and space.classes < FEWEST:
        _warn(f"no intervals over {space.classes} classes; they need {FEWEST}")
    for text in metrics if level else []:
        with contextlib.suppress(UnimetricError):  # a metric of the whole space has no interval
            numbers[f"{text}/from"], numbers[f"{text}/to"] = interval(space, text, level=level)
    if per_class is not None:
        per_class(results_by_class(space, names))
    return numbers


def _warn(text: str) -> None:
    if text:
        logging.getLogger("unimetric").warning("%s", text)


def _describe_unmatched(space: Space) -> str:
    """Return a sentence about the queries that no mean over queries includes."""
    text = f"{space.unmatched:,} of {space.queries:,} queries have no match in the gallery; means over queries do not include them"
    if not len(space.lost):
        return text
    return f"{text}; {len(space.lost):,} of them lose every match to the group rule `{space.group_rule}`"


def check_rows(path: str | Path, embeddings: np.ndarray) -> None:
    """Raise an error unless the embeddings are a table of real numbers that fit float32."""
    if embeddings.dtype.kind not in "fiub" or embeddings.ndim != 2 or not embeddings.size:
        raise UnimetricError(
            f"{path}: `embeddings` must be real numbers of shape (N, D), got {embeddings.dtype} {embeddings.shape}",
            "save one row per image",
        )
    with np.errstate(over="ignore", under="ignore"):
        single = embeddings.astype(np.float32)
    lost = (np.isinf(single) & np.isfinite(embeddings)).any(1) | (embeddings.any(1) & ~single.any(1))
    if lost.any():
        row = int(lost.argmax())
        raise UnimetricError(
            f"{path}: `embeddings` must be in the range of float32, got {np.abs(embeddings[row]).max():.3g} in row {row}",
            "scale all of them: `embeddings / np.abs(embeddings).max()`",
        )


def evaluate_file(
    path: str | Path,
    *,
    metrics: list[str] | tuple[str, ...] = (),
    rerank: bool = False,
    level: float = 0.0,
    geometry: str = "",
    group_rule: str = "",
    per_class: PerClass | None = None,
) -> dict[str, float]:
    """Evaluate saved embeddings.

    Args:
        path: `.npz` file with `embeddings` (N, D), `labels` (N,), and optionally the masks `query` and `gallery` (N,), the groups
            `group` (N,) (integers, -1 for none, or names), the dataset names `dataset` (N,), the class names `names` (N,), and the
            texts `geometry` and `group_rule`.
        metrics: Metric spec strings. Defaults to recall@1.
        rerank: Whether neighbors are re-ranked by k-reciprocal encoding first.
        level: Level of confidence intervals, such as 0.95; 0 for none.
        geometry: `cosine`, `euclidean` or `inner`. Defaults to that of the file, or `cosine`.
        group_rule: Gallery images of its group that a query does not find: `class`, `group` or `none`. Defaults to that of the file,
            or `class`.
        per_class: Callback with the recall@1 of each class, hardest first.

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
    points, options = place(embeddings, None, geometry or str(arrays.get("geometry", "")))
    roles: dict[str, Any] = {key: arrays.get(key) for key in ("query", "gallery", "group")}
    if roles["group"] is not None and roles["group"].dtype.kind == "U":
        roles["group"] = np.unique(roles["group"], return_inverse=True)[1]
    if "dataset" in arrays:
        datasets, roles["source"] = np.unique(arrays["dataset"], return_inverse=True)
        roles["source_names"] = datasets if all(datasets) else ()
    space = Space(points, torch.from_numpy(labels), group_rule=group_rule or str(arrays.get("group_rule", "class")), **roles, **options)
    own = arrays.get("names", arrays["labels"])
    names = list(map(str, own if own.shape == arrays["labels"].shape else arrays["labels"]))
    return numbers_of(space, list(metrics or ("recall(k=1)",)), rerank=rerank, level=level, names=names, per_class=per_class)
