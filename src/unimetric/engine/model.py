"""The model: a backbone and a head; and which of its parameters learn how fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.spec import bind, create, signature


class Model(nn.Module):
    """Pictures to embeddings.

    Args:
        backbone: (B, 3, H, W) -> (B, 1 + N, C).
        head: (B, 1 + N, C) -> (B, D).
    """

    def __init__(self, backbone: Any, head: Any) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.dim: int = head.dim
        self.channels: int = backbone.channels
        self.mean: tuple[float, ...] = backbone.mean
        self.std: tuple[float, ...] = backbone.std

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B N C"]]:
        """The raw embeddings and the tokens."""
        tokens = self.backbone(images)
        return self.head(tokens), tokens


def build_model(config: RunConfig) -> Model:
    """Backbone and head as the settings name them; random weights come from the seed."""
    torch.manual_seed(config.seed)
    backbone = create("backbones", config.backbone, seed=config.seed)
    head = create("heads", config.head, features=backbone.channels, seed=config.seed)
    return Model(backbone, head)


def build_objective(config: RunConfig, *, num_classes: int, dim: int, features: int) -> nn.Module:
    """What the run minimises."""
    torch.manual_seed(config.seed + 1)
    return create(
        "objectives",
        config.objective,
        loss=config.loss,
        miner=config.miner or None,
        num_classes=num_classes,
        dim=dim,
        features=features,
        batch_size=config.batch_size,
        seed=config.seed,
    )


def build_optimizer(config: RunConfig, model: Model, objective: nn.Module) -> torch.optim.Optimizer:
    """One optimiser with a group for the backbone, the head, and each part of the objective that has parameters.

    A part of the objective that says `lr` learns at that rate; none of them decays (Roth et al. 2020: proxies and boundaries are no
    weights of the network).
    """
    part, arguments = bind("optimizers", config.optimizer)
    lr = arguments.get("lr", signature(part).parameters["lr"].default)
    groups: list[dict[str, Any]] = []
    for name, module, rate in (("backbone", model.backbone, lr), ("head", model.head, lr * config.head_lr_scale)):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if parameters:
            groups.append({"name": name, "params": parameters, "lr": rate})
    for name, module in objective.named_modules():
        parameters = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if parameters:
            groups.append({"name": name or "objective", "params": parameters, "lr": getattr(module, "lr", lr), "weight_decay": 0.0})
    return part(groups, **arguments)


def check_fit(config: RunConfig, place: str) -> None:
    """Build everything that needs no picture and no weights: a miner that does not fit the loss is found before anything is fetched."""
    labels = np.repeat(np.arange(config.batch_size), 2)
    try:
        part, arguments = bind("backbones", config.backbone)
        for key, nothing in (("pretrained", False), ("weights", "")):
            if key in signature(part).parameters:
                arguments[key] = nothing
        backbone = part(**arguments)
        head = create("heads", config.head, features=backbone.channels)
        build_objective(config, num_classes=config.batch_size, dim=head.dim, features=backbone.channels)
        create("samplers", config.sampler, labels=labels, batch_size=config.batch_size, seed=config.seed)
        create("transforms", config.transform)
    except UnimetricError as error:
        raise UnimetricError(f"{place}: {error.message}", error.hint) from None
