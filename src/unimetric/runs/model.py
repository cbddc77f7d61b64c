"""The model of a run: a backbone, an adapter and a head."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.fit import NO_CURVATURE
from unimetric.foreign import completed, declared
from unimetric.kinds import Backbone, Head, Loss
from unimetric.spec import OFFERED, bind, create, find, parse


class Model(nn.Module):
    """A backbone and a head.

    Args:
        backbone: Images (B, 3, H, W) -> tokens (B, 1 + N, C).
        head: Tokens (B, 1 + N, C) -> embeddings (B, D).
    """

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = completed("backbones", backbone), completed("heads", head)
        self.frozen: frozenset[str] = frozenset()  # names of the tensors that an adapter does not change
        self.inserted = False  # whether an adapter has added parameters, which change the features before the first step
        self.dim, self.dims = head.dim, head.dims
        self.channels, self.mean, self.std = backbone.channels, backbone.mean, backbone.std

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B N C"], tuple[Tensor, ...]]:
        """Return the raw embeddings, the tokens, and the branches of the head."""
        tokens = self.backbone(images)
        branches = self.head.branches(tokens)
        return self.head.join(branches), tokens, branches


def build_model(config: RunConfig) -> Model:
    """Build the backbone, adapter and head of the settings. The seed sets random weights.

    Args:
        config: Settings of the run.
    """
    bare = build_backbone(config)
    before = {id(tensor) for tensor in (*bare.parameters(), *bare.buffers())}
    backbone = adapted(bare, config)
    model = Model(backbone, create("heads", config.head, features=backbone.channels, seed=config.seed))
    if config.adapter:  # frozen tensors of the backbone are not saved
        model.train()  # an adapter may leave BatchNorm of the backbone in training, whose statistics then change
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase) and module.training]
        moving = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
        state = model.state_dict(keep_vars=True)
        model.frozen = frozenset(key for key, tensor in state.items() if id(tensor) in before - moving and not tensor.requires_grad)
        model.inserted = any(id(tensor) not in before for tensor in backbone.parameters())
    return model


def build_backbone(config: RunConfig) -> Backbone:
    """Build the backbone of the settings, without an adapter. The seed sets random weights.

    Args:
        config: Settings of the run.
    """
    torch.manual_seed(config.seed)
    backbone = create("backbones", config.backbone, seed=config.seed)
    # The fastest layout for convolutions: on a CPU, EfficientNet-Lite0 trains 1.4 times as fast and `small` 1.9 times.
    return backbone.to(memory_format=torch.channels_last)


def adapted(backbone: Backbone, config: RunConfig) -> Backbone:
    """Return the backbone, frozen and with the adapter of the settings if there is one.

    Args:
        backbone: Backbone of the run.
        config: Settings of the run.
    """
    if not config.adapter:
        return backbone
    part, arguments = bind("adapters", config.adapter, seed=config.seed)
    return completed("backbones", part(backbone, **arguments))


def loss_of(config: RunConfig) -> str:
    """Return the spec string of a run's loss.

    It is that of the innermost objective, as in `cached(objective="s2sd(loss='triplet')")`, or else `loss`.
    """
    loss, objective = config.loss, config.objective
    while objective:
        arguments = bind("objectives", objective, **OFFERED | {"loss": loss})[1]
        loss, objective = arguments.get("loss", loss), arguments.get("objective", "")
    return loss


def place(embeddings: Float[Tensor, "N D"], loss: Loss | None, geometry: str) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
    """Return the points to search for neighbors, and the options of the `Space` they are in.

    Args:
        embeddings: Raw embeddings.
        loss: Loss that declares its geometry by `placed`. None means the cosine.
        geometry: Name that replaces the loss's own geometry. Empty for the loss's own.

    Returns:
        The points, and keyword arguments of `Space`.

    Raises:
        UnimetricError: `geometry` is "poincare", but the loss has no curvature.
    """
    points, options = (embeddings, {"geometry": "cosine"}) if loss is None else loss.placed(embeddings)
    if geometry in ("", options["geometry"]):
        return points, options
    if geometry == "poincare":
        raise UnimetricError(*NO_CURVATURE)
    return embeddings, {"geometry": geometry}


def loss_with_geometry(config: RunConfig, dim: int) -> Loss | None:
    """Return a loss like the run's if it declares a geometry, else None.

    Args:
        config: Settings of the run.
        dim: Embedding dimension.

    Raises:
        UnimetricError: The loss does not support the `geometry` of the settings.
    """
    text = loss_of(config)
    declares = declared("losses", find("losses", parse(text).name), "placed") is not Loss.placed
    with torch.random.fork_rng(devices=[]):  # Proxies of a third-party loss must not change the numbers that training draws.
        loss = create("losses", text, num_classes=2, dim=dim) if declares else None
    place(torch.zeros(1, dim), loss, config.geometry)
    return loss
