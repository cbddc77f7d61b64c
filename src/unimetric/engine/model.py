"""The model: a backbone and a head; and which of its parameters learn how fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.spec import OFFERED, bind, create, find, parse, signature


class Model(nn.Module):
    """Pictures to embeddings.

    A head may have several branches, each with a loss of its own: then it says their `dims`, gives them by `branches(tokens)`, and
    joins them to the embedding that neighbours are looked for with by `join(branches)`.

    Args:
        backbone: (B, 3, H, W) -> (B, 1 + N, C).
        head: (B, 1 + N, C) -> (B, D).
    """

    def __init__(self, backbone: Any, head: Any) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.frozen: frozenset[str] = frozenset()  # names of the tensors that an adapter leaves as they are
        self.dim: int = head.dim
        self.dims: tuple[int, ...] = getattr(head, "dims", (head.dim,))
        self.channels: int = backbone.channels
        self.mean: tuple[float, ...] = backbone.mean
        self.std: tuple[float, ...] = backbone.std

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B N C"], tuple[Tensor, ...]]:
        """The raw embeddings, the tokens, and the branches of the head."""
        tokens = self.backbone(images)
        if not hasattr(self.head, "join"):
            embeddings = self.head(tokens)
            return embeddings, tokens, (embeddings,)
        branches = self.head.branches(tokens)
        return self.head.join(branches), tokens, branches


def build_model(config: RunConfig) -> Model:
    """Backbone, adapter and head as the settings name them; random weights come from the seed."""
    torch.manual_seed(config.seed)
    given = create("backbones", config.backbone, seed=config.seed)
    found = {id(tensor) for tensor in (*given.parameters(), *given.buffers())}
    backbone = adapted(given, config)
    model = Model(backbone, create("heads", config.head, features=backbone.channels, seed=config.seed))
    if config.adapter:  # what was there before and does not learn need not be saved
        state = model.state_dict(keep_vars=True)
        model.frozen = frozenset(name for name, tensor in state.items() if id(tensor) in found and not tensor.requires_grad)
    return model


def adapted(backbone: Any, config: RunConfig) -> Any:
    """The backbone as it is trained: itself, or frozen with an adapter in it."""
    if not config.adapter:
        return backbone
    part, arguments = bind("adapters", config.adapter, seed=config.seed)
    return part(backbone, **arguments)


def loss_of(config: RunConfig) -> str:
    """The loss of a run as it is written: inside its objective, such as `s2sd(loss='triplet')`, or else in `loss`."""
    return bind("objectives", config.objective, **OFFERED | {"loss": config.loss})[1].get("loss", config.loss)


def place(embeddings: Float[Tensor, "N D"], loss: Any, geometry: str) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
    """Return the points to search for neighbors, and the options of the `Space` they are in.

    Args:
        embeddings: Raw embeddings.
        loss: Loss that declares its geometry by `placed`. Any other loss, or None, means the cosine.
        geometry: Name that replaces the loss's own geometry. Empty for the loss's own.

    Returns:
        The points, and keyword arguments of `Space`.

    Raises:
        UnimetricError: `geometry` is "poincare", but the loss has no curvature.
    """
    points, options = loss.placed(embeddings) if hasattr(loss, "placed") else (embeddings, {"geometry": "cosine"})
    if geometry in ("", options["geometry"]):
        return points, options
    if geometry == "poincare":
        raise UnimetricError(
            '`geometry = "poincare"` requires a loss with a curvature', 'use `loss = "hyperbolic"`, or `geometry = "cosine"`'
        )
    return embeddings, {"geometry": geometry}


def placing(config: RunConfig, dim: int) -> Any:
    """Return the run's loss if it declares a geometry, else None.

    Args:
        config: Settings of the run.
        dim: Embedding dimension.

    Raises:
        UnimetricError: The loss does not support the `geometry` of the settings.
    """
    text = loss_of(config)
    declares = hasattr(find("losses", parse(text).name), "placed")
    with torch.random.fork_rng(devices=[]):  # Proxies of a third-party loss must not change the numbers that training draws.
        loss = create("losses", text, num_classes=2, dim=dim) if declares else None
    place(torch.zeros(1, dim), loss, config.geometry)
    return loss


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
        placing(config, model.dim)
    except UnimetricError as error:
        raise UnimetricError(f"{place}: {error.message}", error.hint) from None
