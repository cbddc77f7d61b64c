"""Everything that stands on the stage before the first step: pictures, model, objective, optimiser, sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unimetric.config import RunConfig
from unimetric.geometry import seed_dice
from unimetric.images.loading import Resident, Streamed, View, open_pictures
from unimetric.images.recipe import Recipe
from unimetric.images.table import Split, Table
from unimetric.metrics import measure
from unimetric.runs.device import Fabric
from unimetric.runs.display import Display
from unimetric.runs.embed import embed, space_of
from unimetric.runs.model import Model, build_model, loss_with_geometry
from unimetric.runs.rows import read_table, readable
from unimetric.runs.weights import Trained
from unimetric.samplers import rank_slice
from unimetric.spec import bind, create
from unimetric.training.build import build_objective, build_optimizer, refuse_other_sizes
from unimetric.training.capture import compiled


@dataclass(frozen=True)
class TrainingState:
    """What a training run works with.

    Args:
        table, split: the pictures, and which rows train and test.
        labels: (N,) of the training rows, counted from zero.
        skipped: (path, reason) of pictures that cannot be read and are left out.
        recipe: the transform.
        pictures: where squares come from.
        bare: the model itself.
        trained: what of it is saved.
        model: the same as Fabric and the compiler have wrapped it.
        objective, optimizer, sampler: as the settings name them.
        minimize: the objective as the compiler has wrapped it.
        factor: (epochs gone by) -> what every learning rate is multiplied with.
        rates: learning rate of each group, before the factor.
    """

    table: Table
    split: Split
    labels: np.ndarray
    skipped: list[tuple[str, str]]
    recipe: Recipe
    pictures: Resident | Streamed
    bare: Model
    trained: Trained
    model: Any
    objective: Any
    minimize: Any
    optimizer: Any
    sampler: Any
    factor: Callable[[float], float]
    rates: list[float]

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint keeps, apart from the optimisers."""
        parts = {"model": self.trained, "objective": self.objective}
        return parts | ({"sampler": self.sampler} if self.sampler.needs_embeddings else {})

    @property
    def optimizers(self) -> dict[str, Any]:
        """The run's optimiser, and those that the objective has of its own."""
        return {"optimizer": self.optimizer, **getattr(self.objective, "optimizers", {})}

    @property
    def views(self) -> int:
        """How many looks at each picture a step takes."""
        return getattr(self.objective, "views", 1)


def build_training_state(config: RunConfig, fabric: Fabric, display: Display) -> TrainingState:
    """Build everything; what does not fit together is refused before the first picture is read."""
    table, split = read_table(config)
    labels = np.unique(table.labels[split.train], return_inverse=True)[1]
    bare = build_model(config)
    refuse_other_sizes(config, bare, num_classes=int(labels.max()) + 1)
    loss_with_geometry(config, bare.dim)  # rejects a geometry that the loss does not support
    objective = build_objective(config, bare, num_classes=int(labels.max()) + 1)
    seed_dice(objective, config.seed)
    sampler = create("samplers", config.sampler, labels=labels, batch_size=config.batch_size, seed=config.seed)
    recipe = create("transforms", config.transform)
    schedule, arguments = bind("schedules", config.schedule)
    # What these refuse, they refuse now; what they give is made again when all is on the device.
    rank_slice(np.arange(config.batch_size), fabric.global_rank, fabric.world_size)
    schedule(0.0, config.epochs, **arguments)
    build_optimizer(config, bare, objective)

    kept, skipped = [], []
    for rows in (split.train, split.validation, split.test):
        good, bad = readable(config, table, rows, progress=lambda done, total: display.step("checking pictures", done, total))
        kept.append(good)
        skipped += bad
    if skipped:
        split = Split(kept[0], kept[1], kept[2], split.name)
        classes, labels = labels.max(), np.unique(table.labels[split.train], return_inverse=True)[1]
        if labels.max() < classes:  # a class is gone altogether: no proxy may stand for it
            bare = build_model(config)
            objective = build_objective(config, bare, num_classes=int(labels.max()) + 1)
            seed_dice(objective, config.seed)
        sampler = create("samplers", config.sampler, labels=labels, batch_size=config.batch_size, seed=config.seed)

    if fabric.device.type == "cuda":
        bare.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bare, objective = bare.to(fabric.device), objective.to(fabric.device)
    optimizer = build_optimizer(config, bare, objective)
    network: Any = torch.compile(bare, dynamic=False) if config.compile else bare
    model, wrapped = fabric.setup(network, optimizer)
    return TrainingState(
        table=table,
        split=split,
        labels=labels,
        skipped=skipped,
        recipe=recipe,
        pictures=open_pictures(
            table,
            device=fabric.device,
            mean=bare.mean,
            std=bare.std,
            residence=config.residence,
            workers=config.workers,
            progress=lambda done, total: display.step("reading pictures", done, total),
        ),
        bare=bare,
        trained=Trained(bare),
        model=model,
        objective=objective,
        minimize=compiled(objective, fabric.device, fullgraph=False) if config.compile else objective,
        optimizer=wrapped,
        sampler=sampler,
        factor=lambda progress: schedule(progress, config.epochs, **arguments),
        rates=[group["lr"] for group in optimizer.param_groups],
    )


def count_per_dataset(table: Table, split: Split) -> dict[str, tuple[int, int]]:
    """Pictures and classes to train on of each dataset, where there are several."""
    if len(table.source_names) < 2:
        return {}
    source, labels = table.source[split.train], table.labels[split.train]
    mine = {name: source == number for number, name in enumerate(table.source_names)}
    return {name: (int(rows.sum()), len(np.unique(labels[rows]))) for name, rows in mine.items()}


def embed_rows(stage: TrainingState, rows: np.ndarray, config: RunConfig, fabric: Fabric, display: Display) -> Tensor:
    """Embeddings of some rows, each seen at its centre."""
    return embed(
        fabric,
        stage.model,
        stage.pictures,
        rows,
        View(stage.recipe),
        batch=config.evaluate_batch,
        progress=lambda done, total: display.step("evaluating", done, total),
    )


def evaluate_splits(stage: TrainingState, config: RunConfig, fabric: Fabric, display: Display) -> dict[str, float]:
    """Compute every metric on the validation classes, if there are any, and on the test classes.

    Returns:
        Values by `PART/METRIC`, and those of the head's variants by `PART NAME/METRIC`.
    """
    found: dict[str, float] = {}
    own = loss_with_geometry(config, stage.bare.dim)
    loss = next((part for part in stage.objective.modules() if type(part) is type(own)), own)  # the trained one
    for part, rows in (("validation", stage.split.validation), ("test", stage.split.test)):
        if len(rows):
            embeddings = embed_rows(stage, rows, config, fabric, display)
            for name, points in {part: embeddings, **_variants(stage.bare.head, embeddings, part)}.items():
                space = space_of(points, stage.table, rows, loss=loss, geometry=config.geometry)
                found |= {f"{name}/{key}": value for key, value in measure(space, list(config.metrics)).items()}
    return found


def _variants(head: Any, embeddings: Tensor, part: str) -> dict[str, Tensor]:
    make = getattr(head, "variants", None)  # optional in a head
    return {f"{part} {name}": points for name, points in make(embeddings).items()} if make else {}
