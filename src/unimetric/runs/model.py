"""The model of a run: a backbone, an adapter and a head."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.spec import OFFERED, bind, create, find, parse


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


def loss_with_geometry(config: RunConfig, dim: int) -> Any:
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
