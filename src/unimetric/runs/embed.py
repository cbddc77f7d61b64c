"""Embed images with a model, and make a `Space` of the embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.images.loading import Progress, Resident, Streamed, View, open_pictures
from unimetric.images.table import Table
from unimetric.kinds import Loss
from unimetric.metrics import check_roles
from unimetric.runs.device import Fabric, evaluation_batch, set_up
from unimetric.runs.model import place
from unimetric.spec import create


@torch.inference_mode()
def embed(
    fabric: Fabric,
    model: Any,
    loader: Resident | Streamed,
    rows: np.ndarray,
    view: View,
    *,
    batch: int,
    read: Callable[[Any], Tensor] | None = None,
    progress: Progress | None = None,
) -> Float[Tensor, "N D"]:
    """Compute the raw embeddings of some rows, in float32 on the device.

    Each rank embeds a slice of the rows.

    Args:
        fabric: Fabric of the run.
        model: Model.
        loader: Source of image crops.
        rows: Indices of the rows.
        view: Center crop or augmented view.
        batch: Number of images per batch.
        read: (Output of the model) -> vectors (B, D). Defaults to the first output, the embeddings.
        progress: Callback with (finished rows, all rows of this rank).

    Returns:
        The embeddings of all rows, in their order.

    Raises:
        UnimetricError: A GPU computes different embeddings if it embeds the first batch once more.
    """
    was_training = model.training
    model.eval()
    shares = np.array_split(np.resize(rows, max(len(rows), fabric.world_size)), fabric.world_size)  # every rank takes part in `all_gather`
    mine = shares[fabric.global_rank]
    batch = min(batch, len(mine))
    # Repeat rows to fill the last batch: with a single shape, a model is compiled once.
    full = np.resize(mine, -(-len(mine) // batch) * batch)
    starts = range(0, len(full), batch)
    repeats = fabric.device.type == "cuda"
    requests = ((full[start : start + batch], view) for start in chain(starts, starts[:1] if repeats else ()))
    parts: list[Tensor] = []
    means: list[Tensor] = []
    for images in loader.load(requests):
        if repeats and len(parts) in (0, len(starts)):
            means.append(images.flatten(1).mean(1))
        output = model(images)
        vectors = output[0] if read is None else read(output)
        parts.append(vectors.to(torch.float32, copy=True))  # a CUDA graph overwrites its outputs
        if progress is not None:
            progress(min(len(parts) * batch, len(mine)), len(mine))
    model.train(was_training)
    if repeats:
        _check_repeated(parts[0], parts.pop(), means)
    embeddings = torch.cat(parts)[: len(mine)]
    if fabric.world_size == 1:
        return embeddings[: len(rows)]
    padded = torch.zeros(len(shares[0]), embeddings.shape[1], device=embeddings.device)  # the first share is the longest
    padded[: len(embeddings)] = embeddings
    gathered: Any = fabric.all_gather(padded)
    return torch.cat([gathered[rank, : len(share)] for rank, share in enumerate(shares)])[: len(rows)]


def _check_repeated(first: Float[Tensor, "B D"], again: Float[Tensor, "B D"], means: Sequence[Float[Tensor, "B"]]) -> None:
    """Raise an error if embeddings of the same images differ by more than rounding.

    An H200 that several programs shared sometimes returned wrong embeddings of a ViT, mostly without NaN: recall@1 of CUB200 was 51
    instead of 85. This happened often with NVIDIA MPS, and in five of 73 starts without it. The cause is unknown.

    Args:
        first, again: Embeddings of the same images, computed twice.
        means: Mean of each crop, both times.
    """
    far = (again - first).norm(dim=1) > 0.1 * first.norm(dim=1)
    if far.any() or again.isfinite().all() != first.isfinite().all():
        same = bool(((means[1] - means[0]).abs() < 1e-3).all())
        raise UnimetricError(
            "the GPU has computed different " + ("embeddings of the same crops" if same else "crops of the same images"),
            "run it again, with fewer programs on the GPU and without NVIDIA MPS; a model must not draw random numbers in evaluation",
        )


def embed_all(fabric: Fabric, config: RunConfig, model: Any, table: Table, *, progress: Progress | None = None) -> Float[Tensor, "N D"]:
    """Compute the raw embeddings of every image of a table, center-cropped.

    Args:
        fabric: Fabric of `open_fabric`.
        config: Settings: transform, residence, workers and batch.
        model: Model of `build_model`.
        table: Table of the images.
        progress: Callback with (finished images, all images), first for reading, then for embedding.
    """
    model = set_up(fabric, model)
    loader = open_images(fabric, config, model, table, progress=progress)
    view = View(create("transforms", config.transform))
    return embed(fabric, model, loader, np.arange(len(table)), view, batch=evaluation_batch(config, fabric), progress=progress)


def open_images(
    fabric: Fabric, config: RunConfig, model: Any, table: Table, *, compiled: bool = False, progress: Progress | None = None
) -> Resident | Streamed:
    """Open the images of a table for a model, as `open_pictures` does."""
    return open_pictures(
        table,
        device=fabric.device,
        mean=model.mean,
        std=model.std,
        residence=config.residence,
        workers=config.workers,
        compiled=compiled,
        progress=progress,
    )


def space_of(embeddings: Tensor, table: Table, rows: np.ndarray, *, loss: Loss | None = None, geometry: str = "") -> Space:
    """Build the space of some rows of a table, with their labels, queries and gallery.

    Args:
        embeddings: Raw embeddings of the rows, in their order.
        table: Table of the images.
        rows: Indices of the rows.
        loss: Loss that may declare a geometry by `placed`; the default is the cosine.
        geometry: Name that replaces the loss's own geometry. Empty for the loss's own.
    """
    points, options = place(embeddings.detach(), loss, geometry)
    return space_of_points(points, table, rows, **options)


def check_measurable(texts: Sequence[str], table: Table, rows: np.ndarray) -> None:
    """Raise an error if labels, queries and gallery of some rows do not suffice for a metric.

    Call it before their images are read.

    Args:
        texts: Spec strings of metrics.
        table: Table of the images.
        rows: Indices of the rows.
    """
    check_roles(space_of_points(torch.zeros(len(rows), 1), table, rows), texts)


def space_of_points(points: Tensor, table: Table, rows: np.ndarray, **options: Any) -> Space:
    """Build the space of some rows of a table from points that are in their geometry.

    Args:
        points: One point per row, in their order.
        table: Table of the images.
        rows: Indices of the rows.
        options: Geometry of the points: keyword arguments of `Space`.
    """
    return Space(
        points,
        torch.from_numpy(table.labels[rows]),
        query=table.query[rows],
        gallery=table.gallery[rows],
        source=table.source[rows],
        source_names=table.source_names if all(table.source_names) else (),
        group=table.group[rows],
        group_rule=table.group_rule,
        names=[table.paths[row] for row in rows],
        **options,
    )
