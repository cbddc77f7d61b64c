"""Nested embeddings: the first dimensions are an embedding by themselves."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor, nn

from unimetric.arguments import Count, Positive
from unimetric.errors import UnimetricError
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class Matryoshka(Objective):
    """Any loss on the whole embedding and on its first dimensions.

        L = loss(f, y) + sum over m in dims of  w_m loss_m(f[:m], y)

    f is the embedding, which always counts as a whole. Each prefix has its own loss, with its own proxies or
    thresholds. One model then serves several sizes of an index: cut the embeddings, and normalize again.

    Reference:
        Matryoshka representation learning (Kusupati et al., NeurIPS 2022).

    Args:
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        dims: Numbers of leading dimensions. Empty for a half, a quarter and an eighth of the embedding.
        weights: Weights of the losses of `dims`, in their order. Empty for 1. Larger weights of the small
            sizes make these more accurate, because all sizes share the backbone.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
    """

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        dims: tuple[Count, ...] = (),
        weights: tuple[Positive, ...] = (),
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        prefixes = dims or tuple(dim // part for part in (2, 4, 8) if dim // part)
        if max(prefixes, default=1) > dim:
            raise UnimetricError(
                f"`dims` must be at most the embedding dimension {dim} in `matryoshka`, got {max(prefixes)}",
                f'use `head = "linear(dim={max(prefixes)})"`, or smaller `dims`',
            )
        if weights and len(weights) != len(prefixes):
            raise UnimetricError(
                f"`weights` must have one value for each of the {len(prefixes)} `dims` in `matryoshka`, got {len(weights)}",
                "name as many weights as `dims`",
            )
        self.weights = dict(zip(prefixes, weights or [1.0] * len(prefixes), strict=True)) | {dim: 1.0}
        self.prefixes = sorted({dim, *prefixes}, reverse=True)  # the whole embedding first: its loss defines the geometry of the run
        self.losses = nn.ModuleList(create("losses", loss, miner=miner, num_classes=num_classes, dim=size) for size in self.prefixes)

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        names = ["loss", *(f"first {size}" for size in self.prefixes[1:])]
        pairs = zip(self.prefixes, self.losses, strict=True)
        values = [self.weights[size] * loss(output.embeddings[:, :size], labels) for size, loss in pairs]
        return dict(zip(names, values, strict=True))
