"""Embed pictures and measure the space that they make."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.config import RunConfig, check_part, from_settings, load
from unimetric.engine.checkpoint import read_arrays, read_tensors, write_arrays
from unimetric.engine.fabric import Fabric
from unimetric.engine.frozen import Trained
from unimetric.engine.model import build_model, place, placing
from unimetric.engine.pictures import Look, Progress, find_bad, open_pictures
from unimetric.errors import UnimetricError
from unimetric.metrics import Space, interval, measure
from unimetric.pack import located
from unimetric.rerank import check_rerank, reranked
from unimetric.spec import bind, create, find, parse, signature, text_of
from unimetric.table import Split, Table


def open_fabric(config: RunConfig, *, loggers: Any = None, several: bool = False) -> Fabric:
    """Device, precision and strategy as the settings name them; only training uses `several` devices, measuring takes one of them."""
    accelerator, _, devices = config.device.partition(":")
    cuda = torch.cuda.is_available() and accelerator in ("auto", "cuda", "gpu")
    if accelerator in ("cuda", "gpu") and not cuda:
        raise UnimetricError(f"`device = {config.device!r}`, but there is no CUDA device", "write `device = 'cpu'` or `device = 'auto'`")
    for name in ("lightning_fabric", "lightning.fabric"):  # it greets every run with what the settings say already
        logging.getLogger(name).setLevel(logging.WARNING)
    precision = config.precision if config.precision != "auto" else ("bf16-mixed" if cuda else "32-true")
    try:
        count = int(devices) if devices else 1
        return Fabric(
            accelerator="cuda" if cuda else ("cpu" if accelerator == "auto" else accelerator),
            devices=count if several else 1,
            precision=precision,  # type: ignore[arg-type]
            strategy=config.strategy if several else "auto",
            loggers=loggers,
        )
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise UnimetricError(f"cannot set up the device: {error}", "check `device`, `precision` and `strategy`") from None


def read_table(config: RunConfig) -> tuple[Table, Split]:
    """The dataset, and which of its rows train and test."""
    table: Table = create("datasets", config.dataset)
    return table, divided(config, table)


def divided(config: RunConfig, table: Table) -> Split:
    """Which rows of a table train and test."""
    part, arguments = bind("splits", config.split, seed=config.seed)
    return part(table, **arguments)


def readable(
    config: RunConfig, table: Table, rows: np.ndarray, *, progress: Progress | None = None
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Those rows that can be read, where the settings say so, and (path, reason) of the others. Packs were checked when they were made."""
    if config.on_bad_picture != "skip" or not len(rows) or all(map(located, table.paths)):
        return rows, []
    each = np.unique(rows)
    bad = find_bad(table.take(each), workers=config.workers, progress=progress)
    kept = rows[~np.isin(rows, each[[row for row, _ in bad]])]
    if len(np.unique(table.labels[kept])) < 2:
        raise UnimetricError(
            f"`dataset = {config.dataset!r}`: too few classes are left without the {len(bad)} pictures that cannot be read; "
            f"the first: {bad[0][1] if bad else 'none'}",
            "mend them; two classes to train on and two to test on are the least",
        )
    return kept, [(table.paths[each[row]], reason) for row, reason in bad]


@torch.inference_mode()
def embed(
    fabric: Fabric, model: Any, pictures: Any, rows: np.ndarray, look: Look, *, batch: int, progress: Progress | None = None
) -> Float[Tensor, "N D"]:
    """Raw embeddings of some rows, in their order, float32 on the device; shared out over the ranks."""
    was_training = model.training
    model.eval()
    mine = np.array_split(rows, fabric.world_size)[fabric.global_rank]
    batch = min(batch, max(1, len(mine)))
    # Every batch is full, the last one by repetition: one shape, so a compiled model is compiled once.
    full = np.resize(mine, -(-len(mine) // batch) * batch)
    requests = ((full[start : start + batch], look) for start in range(0, len(full), batch))
    parts = []
    for images in pictures.load(requests):
        parts.append(model(images)[0].float())
        if progress is not None:
            progress(min(len(parts) * batch, len(mine)), len(mine))
    model.train(was_training)
    embeddings = torch.cat(parts)[: len(mine)]
    if fabric.world_size == 1:
        return embeddings
    most = -(-len(rows) // fabric.world_size)
    padded = torch.zeros(most, embeddings.shape[1], device=embeddings.device)
    padded[: len(embeddings)] = embeddings
    gathered: Any = fabric.all_gather(padded)
    lengths = [len(share) for share in np.array_split(rows, fabric.world_size)]
    return torch.cat([gathered[rank, :length] for rank, length in enumerate(lengths)])


def embed_all(fabric: Fabric, config: RunConfig, model: Any, table: Table, *, progress: Progress | None = None) -> Float[Tensor, "N D"]:
    """Raw embeddings of every picture of a table, each seen at its centre.

    Args:
        fabric: of `open_fabric(config)`.
        config: its transform, and how to carry it out.
        model: as `build_model` makes it.
        table: the pictures.
        progress: called with (done, all), first while packs are read, then while pictures are embedded.
    """
    model = fabric.setup(model) if any(p.requires_grad for p in model.parameters()) else model.to(fabric.device)
    options = {"mean": model.mean, "std": model.std, "residence": config.residence, "workers": config.workers}
    pictures = open_pictures(table, device=fabric.device, progress=progress, **options)
    look = Look(create("transforms", config.transform))
    return embed(fabric, model, pictures, np.arange(len(table)), look, batch=config.evaluate_batch, progress=progress)


def space_of(embeddings: Tensor, table: Table, rows: np.ndarray, *, loss: Any = None, geometry: str = "") -> Space:
    """Build the space of some rows of a table, with their labels, queries and gallery.

    Args:
        embeddings: Raw embeddings of the rows, in their order.
        table: Table of the images.
        rows: Indices of the rows.
        loss: Loss that may declare a geometry by `placed`; the default is the cosine.
        geometry: Name that replaces the loss's own geometry. Empty for the loss's own.
    """
    points, options = place(embeddings.detach(), loss, geometry)
    return Space(
        points,
        torch.from_numpy(table.labels[rows]),
        query=table.query[rows],
        gallery=table.gallery[rows],
        source=table.source[rows],
        source_names=table.source_names if all(table.source_names) else (),
        **options,
    )


def open_run(folder: str | Path, *, backbone: str = "", head: str = "", epoch: str = "best") -> tuple[RunConfig, Any]:
    """Read the settings of a run, finished or not, and its model with trained weights.

    Args:
        folder: Run folder.
        backbone: Spec string that locates the frozen weights of a run with an adapter, if they have
            moved. Other weights raise an error.
        head: Spec string with other test-time arguments of the head. Empty for the run's own.
        epoch: `best` for the weights of the best epoch, `last` for those of the checkpoint.

    Returns:
        The settings and the model.
    """
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise UnimetricError(f"{folder}: not a run folder (it has no config.toml)", "name a folder that `unimetric train --out` made")
    weights = _weights_file(folder, epoch)
    config = load(folder / "config.toml", **({"backbone": backbone} if backbone else {}))
    config = overridden(config, {"head": head} if head else {}, folder)
    model = build_model(config)
    tensors, _ = read_tensors(weights, "bring back the file, or train the run again in a new folder")
    if epoch == "last":
        tensors = {key.removeprefix("model/"): value for key, value in tensors.items() if key.startswith("model/")}
    Trained(model, place=str(weights)).load_state_dict(tensors)
    return config, model


def _weights_file(folder: Path, epoch: str) -> Path:
    """Return the file with the weights of the best or the last epoch."""
    if epoch not in ("best", "last"):
        raise UnimetricError(f"`epoch` must be one of best, last, got `{epoch}`", "use `--epoch best`")
    weights = folder / ("checkpoint.safetensors" if epoch == "last" else "model.safetensors")
    if weights.is_file():
        return weights
    if epoch == "last":
        raise UnimetricError(f"{folder}: no weights of the last epoch (no checkpoint.safetensors)", "use `--epoch best`")
    if (folder / "done").exists():
        raise UnimetricError(f"{folder}: its weights are gone (no model.safetensors)", "bring them back, or train it again in a new folder")
    raise UnimetricError(f"{folder}: no weights yet (no model.safetensors)", "run `unimetric train` until its first evaluation")


def overridden(config: RunConfig, overrides: dict[str, Any], run: str | Path) -> RunConfig:
    """Replace some settings of a run.

    Another adapter or head raises an error. Only the test-time arguments of the head may change.

    Args:
        config: Settings of the run.
        overrides: Settings by name. Arguments that the head omits keep the run's values.
        run: Run folder, for errors.

    Returns:
        The new settings.
    """
    if overrides.get("adapter", config.adapter) != config.adapter:
        raise UnimetricError(f"{run}: was trained with `adapter = {config.adapter!r}`", "leave `adapter` out, or train another run")
    if "head" in overrides:
        overrides = overrides | {"head": _head_at_test_time(config.head, str(overrides["head"]), run)}
    return from_settings(asdict(config) | overrides, str(run))


def _head_at_test_time(own: str, given: str, run: str | Path) -> str:
    """Return the spec string of a run's head with its test-time arguments replaced by the given ones."""
    if given == own:
        return own
    name = parse(own).name
    free = getattr(find("heads", name), "test_time", ())
    hint = f"change only {' and '.join(f'`{key}`' for key in free)}" if free else "leave `head` out"
    error = UnimetricError(f"{run}: was trained with `head = {own!r}`", f"{hint}, or train another run")
    if parse(given).name != name:
        raise error
    unset = object()  # marks run-provided arguments
    (part, mine), (_, theirs) = (bind("heads", text, features=unset, seed=unset) for text in (own, given))
    merged = {key: value for key, value in (mine | theirs).items() if value is not unset}
    for key, value in merged.items():
        if key not in free and value != mine.get(key, signature(part).parameters[key].default):
            raise error
    return text_of(name, merged)


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
        raise UnimetricError(f"{save}: is a folder", "name a file")
    if isinstance(run, RunConfig):
        config = from_settings(asdict(run) | overrides)
        model = build_model(config)
    else:
        config, model = open_run(run, backbone=overrides.get("backbone", ""), head=overrides.get("head", ""))
        config = overridden(config, overrides, run)
    loss = placing(config, model.dim)
    fabric = open_fabric(config)
    table, split = read_table(config)
    if part not in ("test", "validation", "train") or not len(getattr(split, part)):
        raise UnimetricError(f"the split has no `{part}` rows", "choose test, train, or validation with `split=standard(validation=0.2)`")
    rows, _ = readable(config, table, getattr(split, part), progress=progress)
    if rerank:
        check_rerank(len(rows))
    embeddings = embed_all(fabric, config, model, table.take(rows), progress=progress)
    if save is not None:
        file = Path(save).with_name(Path(save).name.removesuffix(".npz") + ".npz")
        kept = {"labels": table.labels[rows], "query": table.query[rows], "gallery": table.gallery[rows]}
        write_arrays(file, embeddings=embeddings.cpu().numpy(), **kept)
    space = space_of(embeddings, table, rows, loss=loss, geometry=config.geometry)
    return numbers_of(space, list(metrics or config.metrics), rerank=rerank, level=level)


def check_metrics(metrics: Sequence[str], level: float = 0.0) -> None:
    """Stop at a metric or a level that cannot be before any picture is embedded."""
    for text in metrics:
        check_part("metrics", text, "evaluate", "metrics")
    if not 0 <= level < 1:
        raise UnimetricError(f"an interval of level {level}", "write a share such as 0.95, or 0 for none")


def numbers_of(space: Space, metrics: list[str], *, rerank: bool = False, level: float = 0.0) -> dict[str, float]:
    """Metrics of a space, re-ranked if wished, with `NAME/from` and `NAME/to` of an interval where the metric is a mean over queries."""
    space = reranked(space) if rerank else space
    numbers = measure(space, metrics)
    for text in metrics if level else []:
        with contextlib.suppress(UnimetricError):  # a metric of the whole space has none
            numbers[f"{text}/from"], numbers[f"{text}/to"] = interval(space, text, level=level)
    return numbers


def check_rows(path: str | Path, embeddings: np.ndarray) -> None:
    """Stop at embeddings of a file that are no table of real numbers."""
    if embeddings.dtype.kind not in "fiub" or embeddings.ndim != 2 or not embeddings.size:
        raise UnimetricError(
            f"{path}: `embeddings` are {embeddings.dtype} {embeddings.shape}", "save real numbers, one row a picture: (N, D)"
        )


def evaluate_file(
    path: str | Path, *, metrics: list[str] | tuple[str, ...] = (), rerank: bool = False, level: float = 0.0, geometry: str = ""
) -> dict[str, float]:
    """Measure embeddings made elsewhere.

    Args:
        path: an `.npz` file with `embeddings` (N, D) and `labels` (N,), and if there is such a protocol `query` and `gallery` (N,) masks.
        metrics: parts of `metrics/`; default recall@1.
        rerank: put neighbours into k-reciprocal order first.
        level: of confidence intervals, such as 0.95; 0 for none.
        geometry: `cosine` (default), `euclidean` or `inner`.
    """
    check_metrics(metrics, level)
    arrays = read_arrays(Path(path), "save it with numpy.savez(path, embeddings=..., labels=...), or name a run folder or a backbone")
    for key, dimensions in (("embeddings", 2), ("labels", 1)):
        if key not in arrays or arrays[key].ndim != dimensions:
            raise UnimetricError(f"{path}: needs `{key}` with {dimensions} dimension(s)", f"it holds: {', '.join(arrays) or 'nothing'}")
    if len(arrays["embeddings"]) != len(arrays["labels"]):
        raise UnimetricError(f"{path}: {len(arrays['embeddings'])} embeddings but {len(arrays['labels'])} labels", "save one label a row")
    check_rows(path, arrays["embeddings"])
    for key in ("query", "gallery"):
        if key in arrays and arrays[key].dtype != bool:
            raise UnimetricError(f"{path}: `{key}` are {arrays[key].dtype}", f"save a mask: `{key}=np.isin(np.arange(N), rows)`")
    if (arrays["labels"] != arrays["labels"]).any():  # only what is no number is not itself
        raise UnimetricError(f"{path}: some `labels` are not a number", "leave out the rows that have no label")
    labels = np.unique(arrays["labels"], return_inverse=True)[1]  # texts are labels, too
    embeddings = torch.from_numpy(arrays["embeddings"].astype(np.float32))  # of any byte order
    points, options = place(embeddings, None, geometry)
    space = Space(points, torch.from_numpy(labels), query=arrays.get("query"), gallery=arrays.get("gallery"), **options)
    return numbers_of(space, list(metrics or ("recall(k=1)",)), rerank=rerank, level=level)
