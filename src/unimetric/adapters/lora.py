"""LoRA: low-rank updates of the attention projections."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from jaxtyping import Float
from timm.layers import DropPath
from torch import Tensor, nn

from unimetric.adapters._bottleneck import draw_gates
from unimetric.adapters._vit import Adapted, Mergeable, frozen_transformer
from unimetric.arguments import Count, Form, Range, Real


class LowRank(Mergeable):
    """timm's joint projection to q, k and v with a low-rank update of some of the three.

    Args:
        layer: Frozen projection with C inputs and 3 D outputs, or D if it is one of the three alone.
        rank: Rank of each update.
        scale: Factor on the updates.
        targets: Updated projections, letters out of `of`.
        of: Projections of the layer, in the order of its outputs.
        keep: Probability that an update is active for a sample in training, in (0, 1]. Each target
            has a separate gate.

    Shape:
        (B, N, C) -> (B, N, 3 D)
    """

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float, targets: str, keep: float, of: str = "qkv") -> None:
        super().__init__()
        self.layer, self.scale, self.targets, self.of = layer, scale, targets, of
        inside, outside = layer.in_features, layer.out_features // len(of)
        bound = 1 / math.sqrt(inside)  # the default of torch and peft: Kaiming uniform with a = sqrt(5)
        self.down = nn.Parameter(torch.empty(inside, len(targets) * rank).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(len(targets), rank, outside))
        self.drop = DropPath(1 - keep)

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N E"]:
        parts = list(self.layer(x).chunk(len(self.of), -1))
        hidden = x @ self.down  # one product for all targets stores x once
        gates = draw_gates(self.drop, hidden, targets=len(self.targets))
        for name, part, gate, up in zip(self.targets, hidden.chunk(len(self.targets), -1), gates, self.scale * self.up, strict=True):
            index = self.of.index(name)
            parts[index] = parts[index] + (part * gate) @ up
        return torch.cat(parts, -1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return one frozen linear layer that equals this module in testing."""
        weight = self.layer.weight.clone()
        for name, down, up in zip(self.targets, self.down.chunk(len(self.targets), -1), self.up, strict=True):
            rows = weight.chunk(len(self.of))[self.of.index(name)]  # a view
            rows += (self.scale * (down.double() @ up.double())).T.to(rows.dtype)
        layer = nn.Linear(self.layer.in_features, self.layer.out_features, bias=self.layer.bias is not None, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), self.layer.bias
        return layer


def lora(
    backbone: Any,
    *,
    rank: Count = 128,
    alpha: Real = 32.0,
    targets: Annotated[str, Form(r"(?!.*(.).*\1)[qkv]+", "distinct letters out of `qkv`")] = "qk",
    keep: Annotated[float, Range(above=0, most=1)] = 1.0,
) -> nn.Module:
    """Add low-rank updates to the attention projections of a frozen transformer.

        W x + alpha / rank * g * B A x,    B = 0 at the start

    g is 1 in testing. In training g is 1/keep with probability `keep` and 0 otherwise, drawn per
    sample, layer and target. `keep=0.5` is the stochastic LoRA of PUMA (Kim et al. 2023).

    Differs from the paper:
        LoRA updates q and v (`targets="qv"`); PUMA updates q and k. PUMA's code fails as released,
        because it divides a `ParameterList`. It also draws B like A instead of setting it to zero,
        and multiplies by alpha / (C / rank), 10.7 for rank 128 of a ViT-S instead of 0.25.
        `alpha=1365.3` has that factor.

    Reference:
        LoRA: low-rank adaptation of large language models (Hu et al., ICLR 2022).

    Args:
        backbone: Backbone with a timm vision transformer.
        rank: Rank of each update, at least 1.
        alpha: Weight of the updates before the division by the rank.
        targets: Updated projections, letters out of `q`, `k` and `v`.
        keep: Probability that an update is active for a sample in training, in (0, 1].

    Returns:
        The backbone with updates, as a module with the same input and output shapes.
    """
    add_low_rank(frozen_transformer(backbone), rank=rank, scale=alpha / rank, targets=targets, keep=keep)
    return Adapted(backbone)


def add_low_rank(network: Any, *, rank: int, scale: float, targets: str, keep: float) -> None:
    """Replace the attention projections of every block by ones with a low-rank update."""
    options: dict[str, Any] = {"rank": rank, "scale": scale, "keep": keep}
    for block in network.blocks:
        own = vars(block.attn)
        if block.attn.qkv is not None:
            block.attn.qkv = LowRank(block.attn.qkv, targets=targets, **options)
            if "qkv_bias_separate" in own:  # otherwise, an `EvaAttention` reads the weight of the layer instead of calling it
                block.attn.qkv_bias_separate = True
            continue
        for name in targets:  # a network with three separate layers
            setattr(block.attn, f"{name}_proj", LowRank(getattr(block.attn, f"{name}_proj"), targets=name, of=name, **options))
