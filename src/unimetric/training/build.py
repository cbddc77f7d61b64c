"""Build the objective and the optimizer of a run, and check that components fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError, locating
from unimetric.fit import check_takes_miner
from unimetric.foreign import completed
from unimetric.kinds import Objective
from unimetric.runs.model import Model, adapted, loss_of, loss_with_geometry
from unimetric.runs.weights import Undrawn
from unimetric.spec import bind, create, parse, signature


def build_objective(config: RunConfig, model: Model, *, num_classes: int) -> Objective:
    """Build the objective of a run, and pass it the model.

    Call this before either moves to the device.

    Raises:
        UnimetricError: The components do not fit together.
    """
    check_takes_miner(loss_of(config), config.miner)
    torch.manual_seed(config.seed + 1)
    objective: Objective = create(
        "objectives",
        config.objective,
        loss=config.loss,
        miner=config.miner or None,
        num_classes=num_classes,
        dim=model.dim,
        branches=model.dims,
        features=model.channels,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    objective.meet(model)
    return objective


def check_sizes(config: RunConfig, model: Model, *, num_classes: int) -> None:
    """Check the sizes that the settings write out.

    These are `features` of the head, and `num_classes` and `dim` of the loss. Third-party components are
    skipped, because their arguments may have other meanings.

    Raises:
        UnimetricError: A size differs from that of the run.
    """
    known = {"num_classes": num_classes, "dim": model.dim, "features": model.channels}
    for kind, text, keys in (("heads", config.head, ("features",)), ("losses", loss_of(config), ("num_classes", "dim"))):
        if "." in parse(text).name:
            continue
        written = bind(kind, text, **({"features": model.channels} if kind == "heads" else known))[1]
        for key in keys:
            allowed = (model.dim, *model.dims) if key == "dim" else (known[key],)
            more_classes = key == "num_classes" and written.get(key, 0) > num_classes
            if key in written and written[key] not in allowed and not more_classes:
                raise UnimetricError(f"`{key}` must be {known[key]} in this run, got {written[key]} in `{text}`", f"leave `{key}` out")


def build_optimizer(config: RunConfig, model: Model, objective: Objective) -> torch.optim.Optimizer:
    """Build the optimizer, with groups for the backbone, the head and the objective.

    Args:
        config: Settings of the run.
        model: Model of the run, on its device.
        objective: Objective of the run. Its method `groups` defines its groups.

    Raises:
        UnimetricError: Nothing is trainable, or the optimizer rejects its arguments.
    """
    part, arguments = bind("optimizers", config.optimizer)
    if "lr" not in signature(part).parameters:
        raise UnimetricError(f"`optimizer = {config.optimizer!r}`: has no argument `lr`", "name a function `(groups, *, lr)` that calls it")
    lr = arguments.get("lr", signature(part).parameters["lr"].default)
    groups: list[dict[str, Any]] = []
    parameters = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
    if parameters:
        groups.append({"name": "backbone", "params": parameters, "lr": lr})
    groups += model.head.groups(lr * config.head_lr_scale)
    groups += objective.groups(lr)
    if not groups:
        raise UnimetricError("neither head nor loss has anything to learn", "use a head with weights, such as `linear`")
    if config.warmup_epochs and [group["name"] for group in groups] == ["backbone"]:
        raise UnimetricError(
            f"neither head nor loss has anything to learn in `warmup_epochs = {config.warmup_epochs}`", "use `warmup_epochs = 0`"
        )
    try:
        return part(groups, **arguments)
    except ValueError as error:  # such as torch's for a negative learning rate
        raise UnimetricError(f"`optimizer = {config.optimizer!r}`: {error}", "check its arguments") from None


def check_fit(config: RunConfig, place: str) -> None:
    """Check that the components of a run fit together, without images and weights.

    No pretrained weights are read.

    Args:
        config: Settings of the run.
        place: Name of the settings in errors.

    Raises:
        UnimetricError: A component is missing or does not fit.
    """
    labels = np.repeat(np.arange(config.batch_size), 2)
    with locating(place), Undrawn():  # no value of a parameter matters here
        part, arguments = bind("backbones", config.backbone)
        for key, nothing in (("pretrained", False), ("weights", "")):
            if key in signature(part).parameters:
                arguments[key] = nothing
        backbone = adapted(completed("backbones", part(**arguments)), config)
        model = Model(backbone, create("heads", config.head, features=backbone.channels))
        build_objective(config, model, num_classes=config.batch_size)
        create("samplers", config.sampler, labels=labels, batch_size=config.batch_size, seed=config.seed)
        create("transforms", config.transform)
        loss_with_geometry(config, model.dim)
