"""Build the objective and the optimizer of a run, and check that its components fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.runs.model import Model, adapted, loss_of, loss_with_geometry
from unimetric.spec import bind, create, find, parse, signature


def build_objective(config: RunConfig, model: Model, *, num_classes: int) -> nn.Module:
    """What the run minimises; it meets the model before either is moved to the device."""
    name = parse(loss_of(config)).name
    if config.miner and "." not in name and "miner" not in signature(find("losses", name)).parameters:
        raise UnimetricError(f"`miner = {config.miner!r}`, but the loss `{name}` takes none", "leave it empty: `miner=` after the loss")
    torch.manual_seed(config.seed + 1)
    objective = create(
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
    if hasattr(objective, "meet"):
        objective.meet(model)
    return objective


def refuse_other_sizes(config: RunConfig, model: Model, *, num_classes: int) -> None:
    """Stop at a size that was written and that the run's own does not fit: torch would say so in the first step, or read what is not there.

    Args:
        config: its head and loss.
        model: as `build_model` makes it.
        num_classes: to train on.
    """
    known = {"num_classes": num_classes, "dim": model.dim, "features": model.channels}
    for kind, text in (("heads", config.head), ("losses", loss_of(config))):
        if "." in parse(text).name:
            continue  # code outside may mean something else by these words
        written = bind(kind, text, **({"features": model.channels} if kind == "heads" else known))[1]
        for key in ("features",) if kind == "heads" else ("num_classes", "dim"):
            good = (model.dim, *model.dims) if key == "dim" else (known[key],)
            if key in written and written[key] not in good and not (key == "num_classes" and written[key] > num_classes):
                raise UnimetricError(f"`{text}`: `{key}` is {known[key]} in this run, not {written[key]}", f"leave `{key}` out")


def build_optimizer(config: RunConfig, model: Model, objective: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer, with groups for the backbone, the head and the modules of the objective.

    A module of the objective may set its learning rate by `lr`, and other options by `group`. Its weight decay is 0 unless `group` sets
    it, as in Roth et al. 2020. Modules with the same options share a group. Modules with `own_step` are left to the objective.
    """
    part, arguments = bind("optimizers", config.optimizer)
    lr = arguments.get("lr", signature(part).parameters["lr"].default)
    groups: list[dict[str, Any]] = []
    for name, module, rate in (("backbone", model.backbone, lr), ("head", model.head, lr * config.head_lr_scale)):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if parameters:
            groups.append({"name": name, "params": parameters, "lr": rate})
    alike: dict[str, dict[str, Any]] = {}
    apart = {id(parameter) for module in objective.modules() if getattr(module, "own_step", False) for parameter in module.parameters()}
    for name, module in objective.named_modules():
        parameters = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad and id(parameter) not in apart]
        if parameters:
            options = {"lr": getattr(module, "lr", lr), "weight_decay": 0.0} | getattr(module, "group", {})
            # Those with the same options share a group: each one is a round of launches at every step.
            group = alike.setdefault(repr(sorted(options.items())), {"name": name or "objective", "params": [], **options})
            group["params"] += parameters
    groups += alike.values()
    if not groups or (config.warmup_epochs and groups[0]["name"] == "backbone" and len(groups) == 1):
        raise UnimetricError(
            "neither head nor loss has anything to learn" + (f" in `warmup_epochs = {config.warmup_epochs}`" if groups else ""),
            "write `warmup_epochs = 0`" if groups else "choose a head with weights, such as `linear`",
        )
    try:
        return part(groups, **arguments)
    except ValueError as error:  # such as torch's about a rate below zero
        raise UnimetricError(f"`optimizer = {config.optimizer!r}`: {error}", "check its arguments") from None


def check_fit(config: RunConfig, place: str) -> None:
    """Build everything that needs no picture and no weights: a miner that does not fit the loss is found before anything is fetched."""
    labels = np.repeat(np.arange(config.batch_size), 2)
    try:
        part, arguments = bind("backbones", config.backbone)
        for key, nothing in (("pretrained", False), ("weights", "")):
            if key in signature(part).parameters:
                arguments[key] = nothing
        backbone = adapted(part(**arguments), config)
        model = Model(backbone, create("heads", config.head, features=backbone.channels))
        build_objective(config, model, num_classes=config.batch_size)
        create("samplers", config.sampler, labels=labels, batch_size=config.batch_size, seed=config.seed)
        create("transforms", config.transform)
        loss_with_geometry(config, model.dim)
    except UnimetricError as error:
        raise UnimetricError(f"{place}: {error.message}", error.hint) from None
