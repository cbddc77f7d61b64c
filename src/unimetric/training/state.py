"""Everything a training step needs: images, model, objective, optimizer and sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unimetric.config import RunConfig
from unimetric.geometry import seed_dice
from unimetric.images.loading import Resident, Streamed, View
from unimetric.images.recipe import Recipe
from unimetric.images.table import Split, Table
from unimetric.kinds import Loss, Objective
from unimetric.metrics import measure
from unimetric.runs.device import Fabric, evaluation_batch
from unimetric.runs.display import Display
from unimetric.runs.embed import check_measurable, embed, open_images, space_of
from unimetric.runs.model import Model, build_backbone, build_model, loss_with_geometry
from unimetric.runs.rows import read_table, read_watched, readable
from unimetric.runs.weights import TensorWriter, Trained
from unimetric.samplers import occurrence, rank_slice
from unimetric.spec import bind, create
from unimetric.training.build import build_objective, build_optimizer, check_sizes
from unimetric.training.capture import compiled, compiled_model
from unimetric.training.distributed import averages_gradients, clip_norm, share_first_rank
from unimetric.training.scores import score_of


@dataclass
class TrainingState:
    """Everything a training step needs.

    Args:
        config: Settings of the run.
        fabric: Device, precision and ranks.
        display: Progress output.
        table: Table of the images.
        split: Rows of training, validation and test, without skipped images.
        labels: Classes of the training rows, from 0 on.
        skipped: Path and reason of each image that cannot be read.
        recipe: Transform.
        loader: Source of image crops.
        bare: Model without the wrapping of Fabric and the compiler.
        trained: Weights of the model that are saved.
        model: Model wrapped by Fabric and, if set, the compiler.
        objective: Objective of the run.
        minimize: Objective, compiled if set.
        optimizer: Optimizer wrapped by Fabric.
        sampler: Sampler of the run.
        factor: Schedule: (epochs so far) -> factor of every learning rate.
        rates: Learning rate of each parameter group, before the factor.
        backbone_parameters: Trainable parameters of the backbone, which warm-up freezes.
        watched: Tables of the test classes of other datasets; see `watch_datasets`.
        untrained: Scores of the raw backbone: `test`, and one per other dataset.
        test_score: Score of the last evaluation on the test classes.
        warming: Whether the current epoch is a warm-up epoch.
        writer: Writer of the weights of the best epoch.
    """

    config: RunConfig
    fabric: Fabric
    display: Display
    table: Table
    split: Split
    labels: np.ndarray
    skipped: list[tuple[str, str]]
    recipe: Recipe
    loader: Resident | Streamed
    bare: Model
    trained: Trained
    model: Any
    objective: Any
    minimize: Any
    optimizer: Any
    sampler: Any
    factor: Callable[[float], float]
    rates: list[float]
    backbone_parameters: list[nn.Parameter]
    watched: dict[str, Table] = field(default_factory=dict)
    untrained: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    test_score: dict[str, Any] = field(default_factory=dict, init=False)
    warming: bool = field(default=False, init=False)
    writer: TensorWriter = field(default_factory=TensorWriter, init=False)

    @property
    def parts(self) -> dict[str, Any]:
        """Everything with a `state_dict()` that a checkpoint stores, except the optimizers."""
        return {"model": self.trained, "objective": self.objective, "sampler": self.sampler}

    @property
    def optimizers(self) -> dict[str, Any]:
        """The run's optimizer, and those of the objective."""
        return {"optimizer": self.optimizer, **self.objective.optimizers}

    @property
    def views(self) -> int:
        """Number of augmented views per image."""
        return self.objective.views

    @property
    def steps(self) -> int:
        """Number of steps per epoch."""
        return len(self.sampler)

    @property
    def chosen_on(self) -> str:
        """Part of the split that selects the best epoch: `validation` if it exists, else `test`."""
        return "validation" if len(self.split.validation) else "test"

    @cached_property
    def copies(self) -> np.ndarray:
        """How often the image of each training row occurs in earlier training rows."""
        return occurrence(self.split.train)

    @cached_property
    def most_copies(self) -> int:
        """Upper bound, exclusive, of `copies`."""
        return int(self.copies.max()) + 1

    def begin_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch, training mode, and the warm-up, which freezes the backbone."""
        self.sampler.epoch = epoch
        self.model.train()
        self.objective.train()
        self.warming = epoch < self.config.warmup_epochs
        for parameter in self.backbone_parameters:
            # Some strategies wait for the gradient of each parameter; `limit_gradients` drops it.
            waits = self.fabric.world_size > 1 and not averages_gradients(self.fabric)
            parameter.requires_grad_(not self.warming or waits)

    def set_rates(self, now: float) -> None:
        """Set the learning rate of each parameter group.

        Args:
            now: Number of epochs so far, with the fraction of the current one.
        """
        factor = self.factor(now)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def limit_gradients(self) -> None:
        """Drop the gradients of the backbone during warm-up, then clip the others."""
        if self.warming:
            for parameter in self.backbone_parameters:
                parameter.grad = None
        config = self.config
        if config.clip_norm:
            clip_norm(self.fabric, self.model, self.optimizer, largest=config.clip_norm)
        if config.clip_value:
            self.fabric.clip_gradients(self.model, self.optimizer, clip_val=config.clip_value)


def build_training_state(config: RunConfig, fabric: Fabric, display: Display) -> TrainingState:
    """Build all parts of a run, each once.

    Components that do not fit raise an error before an image is read. If images are skipped, the model, the
    objective and the sampler are built again for the remaining classes.
    """
    rank_slice(np.arange(config.batch_size), fabric.global_rank, fabric.world_size)  # rejects a batch that ranks cannot share
    recipe, factor = create("transforms", config.transform), build_schedule(config)
    table, split = read_table(config)
    watched = read_watched(config)
    learner = build_learner(config, fabric, table, split)
    split, skipped = skip_unreadable(config, table, split, display)
    labels, bare, objective, optimizer, sampler = build_learner(config, fabric, table, split) if skipped else learner
    for _, rows, metrics in measured_parts(config, split):
        check_measurable(metrics, table, rows)
    # Not tried with several ranks, which exchange gradients.
    graphs = fabric.device.type == "cuda" and fabric.world_size == 1 and bool(objective.one_pass)
    network: Any = compiled_model(bare, graphs=graphs) if config.compile else bare
    model, wrapped = fabric.setup(network, optimizer)
    return TrainingState(
        config=config,
        fabric=fabric,
        display=display,
        table=table,
        split=split,
        labels=labels,
        skipped=skipped,
        recipe=recipe,
        loader=open_images(fabric, config, bare, table, compiled=config.compile, progress=partial(display.step, "reading images")),
        bare=bare,
        trained=Trained(bare),
        model=model,
        objective=objective,
        minimize=compiled(objective, fabric.device, fullgraph=False) if config.compile else objective,
        optimizer=wrapped,
        sampler=sampler,
        factor=factor,
        rates=[group["lr"] for group in optimizer.param_groups],
        backbone_parameters=[parameter for parameter in bare.backbone.parameters() if parameter.requires_grad],
        watched=watched,
    )


def build_learner(
    config: RunConfig, fabric: Fabric, table: Table, split: Split
) -> tuple[np.ndarray, Model, Objective, torch.optim.Optimizer, Any]:
    """Build what depends on the training rows, not on the images.

    Returns:
        Classes of the training rows from 0 on, the model, objective and optimizer on the device, and the sampler.
    """
    classes, labels = np.unique(table.labels[split.train], return_inverse=True)
    num_classes = int(labels.max()) + 1
    model = build_model(config)
    check_sizes(config, model, num_classes=num_classes)
    loss_with_geometry(config, model.dim)  # rejects a geometry that the loss does not support
    objective = build_objective(config, model, num_classes=num_classes)
    seed_dice(objective, config.seed)
    names = tuple(table.class_names[label] for label in classes)
    sampler = create("samplers", config.sampler, labels=labels, class_names=names, batch_size=config.batch_size, seed=config.seed)
    model, objective = model.to(fabric.device), objective.to(fabric.device)
    return labels, model, objective, build_optimizer(config, model, objective), sampler


def build_schedule(config: RunConfig) -> Callable[[float], float]:
    """Build the schedule, and check that it accepts the run's number of epochs."""
    schedule, arguments = bind("schedules", config.schedule)
    schedule(0.0, config.epochs, **arguments)
    return lambda now: schedule(now, config.epochs, **arguments)


def skip_unreadable(config: RunConfig, table: Table, split: Split, display: Display) -> tuple[Split, list[tuple[str, str]]]:
    """Remove the images that cannot be read from a split, if the settings allow it.

    Args:
        config: Settings of the run; see `on_bad_picture`.
        table: Table of the images.
        split: Rows of training, validation and test.
        display: Progress output.

    Returns:
        The split, and path and reason of each skipped image.
    """
    rows, skipped = [], []
    for part in (split.train, split.validation, split.test):
        good, bad = readable(config, table, part, progress=partial(display.step, "checking images"))
        rows.append(good)
        skipped += bad
    return (Split(rows[0], rows[1], rows[2], split.name) if skipped else split), skipped


def count_per_dataset(table: Table, split: Split) -> dict[str, tuple[int, int]]:
    """Return the numbers of training images and classes per dataset, if there are several."""
    if len(table.source_names) < 2:
        return {}
    source, labels = table.source[split.train], table.labels[split.train]
    rows = {name: source == number for number, name in enumerate(table.source_names)}
    return {name: (int(mine.sum()), len(np.unique(labels[mine]))) for name, mine in rows.items()}


def embed_rows(
    state: TrainingState, rows: np.ndarray, *, loader: Any = None, model: Any = None, read: Callable[[Any], Tensor] | None = None
) -> Tensor:
    """Embed some rows, center-cropped.

    Args:
        state: State of the run.
        rows: Indices of the rows in the table.
        loader: Source of image crops. Defaults to that of the run.
        model: Model. Defaults to that of the run.
        read: (Output of the model) -> vectors. Defaults to the embeddings.
    """
    return embed(
        state.fabric,
        state.model if model is None else model,
        state.loader if loader is None else loader,
        rows,
        View(state.recipe),
        batch=evaluation_batch(state.config, state.fabric),
        read=read,
        progress=partial(state.display.step, "evaluating"),
    )


def embed_with_features(state: TrainingState, rows: np.ndarray, *, loader: Any = None) -> tuple[Tensor, Tensor]:
    """Return the embeddings of some rows, and the features of the raw backbone.

    The features are its global token, without adapter and head.

    Args:
        state: State of the run, before the first step.
        rows: Indices of the rows in the table.
        loader: Source of image crops. Defaults to that of the run.
    """
    config, fabric = state.config, state.fabric
    if not state.bare.inserted:  # one pass gives both
        both = embed_rows(state, rows, loader=loader, read=lambda output: torch.cat([output[0].float(), output[1][:, 0].float()], 1))
        embeddings, features = both.tensor_split([state.bare.dim], 1)
        return embeddings, features
    devices = [fabric.device] if fabric.device.type == "cuda" else []  # by default, all GPUs of the machine are initialized
    with torch.random.fork_rng(devices):  # inserted parameters change the features, so they need a backbone of their own
        backbone = build_backbone(config).requires_grad_(False).to(fabric.device)
    features = embed_rows(state, rows, loader=loader, model=Autocast(fabric, backbone), read=lambda tokens: tokens[:, 0])
    return embed_rows(state, rows, loader=loader), features


class Autocast(nn.Module):
    """Model in the precision of the run, as if Fabric had set it up.

    Crops keep their precision: they are not made inside.
    """

    def __init__(self, fabric: Fabric, model: nn.Module) -> None:
        super().__init__()
        self.fabric, self.model = fabric, model

    def forward(self, images: Tensor) -> Any:
        with self.fabric.autocast():
            return self.model(images)


def measured_parts(config: RunConfig, split: Split) -> list[tuple[str, np.ndarray, list[str]]]:
    """Return the parts of the split to evaluate: name, rows and metrics."""
    parts = [
        ("validation", split.validation, config.test_metrics),
        ("test", split.test, config.test_metrics),
        ("train", np.unique(split.train), config.train_metrics),  # a sampled split may repeat rows
    ]
    return [(part, rows, metrics) for part, rows, metrics in parts if len(rows) and metrics]


def evaluate_splits(state: TrainingState) -> dict[str, float]:
    """Compute every metric on its part of the split.

    The parts are the validation and test classes, and the training images.

    Returns:
        Values by `PART/METRIC`, and those of the head's variants by `PART NAME/METRIC`.
    """
    share_first_rank(state.fabric, [*state.bare.buffers(), *state.objective.parameters()])
    found: dict[str, float] = {}
    for part, rows, metrics in measured_parts(state.config, state.split):
        found |= measure_embeddings(state, part, rows, metrics, embed_rows(state, rows))
    return found


def evaluate_starting_point(state: TrainingState) -> tuple[dict[str, float], dict[str, float]]:
    """Compute every metric before the first step, of the model and of the raw backbone.

    The head of an untrained model is often a random projection. What training has to improve on is the backbone itself.

    Returns:
        Values of the model as in `evaluate_splits`, and values by `PART/METRIC` of the raw backbone's features by the cosine.
    """
    found: dict[str, float] = {}
    raw: dict[str, float] = {}
    for part, rows, metrics in measured_parts(state.config, state.split):
        embeddings, features = embed_with_features(state, rows)
        found |= measure_embeddings(state, part, rows, metrics, embeddings)
        space = space_of(features, state.table, rows)
        if part == "test":
            state.untrained[part] = score_of(space, state.config.metrics[0])
        raw |= {f"{part}/{key}": value for key, value in measure(space, metrics).items()}
    return found, raw


def measure_embeddings(state: TrainingState, part: str, rows: np.ndarray, metrics: list[str], embeddings: Tensor) -> dict[str, float]:
    """Compute metrics of the embeddings of some rows, and of the variants of the head.

    They are computed in the geometry of the run.

    Args:
        state: State of the run.
        part: Name of the part.
        rows: Indices of the rows in the table.
        metrics: Metric spec strings.
        embeddings: Raw embeddings of the rows.

    Returns:
        Values by `PART/METRIC`, and those of the head's variants by `PART NAME/METRIC`.
    """
    found: dict[str, float] = {}
    loss = trained_loss(state)
    variants = {f"{part} {name}": points for name, points in state.bare.head.variants(embeddings).items()}
    for name, points in {part: embeddings, **variants}.items():
        space = space_of(points, state.table, rows, loss=loss, geometry=state.config.geometry)
        found |= {f"{name}/{key}": value for key, value in measure(space, metrics).items()}
        if name == "test":
            state.test_score = score_of(space, state.config.metrics[0])
    return found


def trained_loss(state: TrainingState) -> Loss | None:
    """Return the trained loss of a run if it declares a geometry, else None."""
    own = loss_with_geometry(state.config, state.bare.dim)
    return next((module for module in state.objective.modules() if type(module) is type(own)), own)
