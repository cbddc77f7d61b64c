"""Nested embeddings: the first dimensions are an embedding by themselves."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unimetric.arguments import Count, NonNegative, Positive
from unimetric.errors import UnimetricError
from unimetric.geometry import cosines
from unimetric.kinds import Objective, Output
from unimetric.objectives.s2sd import distillation as divergence
from unimetric.spec import create


class Matryoshka(Objective):
    """Any loss on the whole embedding and on its first dimensions.

        L = loss(f, y) + sum over m in dims of  w_m loss_m(f[:m], y)  +  distillation mean_m KL(S || S_m)

    f is the embedding, which always counts as a whole. Each prefix has its own loss, with its own proxies or
    thresholds. One model then serves several sizes of an index: cut the embeddings, and normalize again.

    S and S_m are the (B, B) cosine similarities of the whole embedding and of its first m dimensions. With
    `distillation`, the small sizes also learn from the whole embedding, as in `s2sd`; the whole has no
    gradient from it.

    Reference:
        Matryoshka representation learning (Kusupati et al., NeurIPS 2022).

    Args:
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        dims: Numbers of leading dimensions. Empty for those of a half, a quarter and an eighth of the embedding that are
            above 1. The cosine of one dimension is a sign, without a gradient except for rounding.
        weights: Weights of the losses of `dims`, in their order. Empty for 1. Larger weights of the small
            sizes make these more accurate, because all sizes share the backbone.
        distillation: Weight of the distillation from the whole embedding; 0 skips it.
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
        distillation: NonNegative = 0.0,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        prefixes = dims or tuple(dim // part for part in (2, 4, 8) if dim // part > 1)
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
        self.weights = {dim: 1.0} | dict(zip(prefixes, weights or [1.0] * len(prefixes), strict=True))
        self.prefixes = sorted({dim, *prefixes}, reverse=True)  # the whole embedding first: its loss defines the geometry of the run
        self.distillation = distillation
        self.losses = nn.ModuleList(create("losses", loss, miner=miner, num_classes=num_classes, dim=size) for size in self.prefixes)

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        names = ["loss", *(f"first {size}" for size in self.prefixes[1:])]
        pairs = zip(self.prefixes, self.losses, strict=True)
        values = [self.weights[size] * loss(output.embeddings[:, :size], labels) for size, loss in pairs]
        terms = dict(zip(names, values, strict=True))
        if self.distillation and len(self.prefixes) > 1:
            whole = cosines(output.embeddings.detach())[None]
            learned = [divergence(cosines(output.embeddings[:, :size]), whole, temperature=1.0) for size in self.prefixes[1:]]
            terms["distillation"] = self.distillation * torch.cat(learned).mean()
        return terms
