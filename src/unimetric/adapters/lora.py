"""Low-rank changes to the attention's projections."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath
from torch import Tensor, nn

from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.errors import UnimetricError


class LowRank(nn.Module):
    """timm's joint projection to q, k and v, with something of low rank added to some of the three.

    Args:
        layer: the frozen projection, (C) -> (3 D).
        rank: of what is added.
        scale: its factor.
        targets: which of `q`, `k`, `v`.
        keep: probability that it counts for a sample in training.
    """

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float, targets: str, keep: float) -> None:
        super().__init__()
        self.layer, self.scale, self.targets = layer, scale, targets
        inside, outside = layer.in_features, layer.out_features // 3
        bound = 1 / math.sqrt(inside)  # torch's and peft's own: kaiming uniform with a = sqrt(5)
        self.down = nn.Parameter(torch.empty(inside, len(targets) * rank).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(len(targets), rank, outside))
        self.drop = DropPath(1 - keep)

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N E"]:
        parts = list(self.layer(x).chunk(3, -1))
        hidden = x @ self.down  # of all targets at once: x is kept once
        hidden = hidden * self.drop(hidden.new_ones(len(x), 1, 1))
        for name, part, up in zip(self.targets, hidden.chunk(len(self.targets), -1), self.scale * self.up, strict=True):
            place = "qkv".index(name)
            parts[place] = parts[place] + part @ up
        return torch.cat(parts, -1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One frozen layer that does in testing what this does."""
        weight = self.layer.weight.clone()
        for name, down, up in zip(self.targets, self.down.chunk(len(self.targets), -1), self.up, strict=True):
            rows = weight.chunk(3)["qkv".index(name)]  # a view
            rows += (self.scale * (down.double() @ up.double())).T.to(rows.dtype)
        layer = nn.Linear(self.layer.in_features, self.layer.out_features, bias=self.layer.bias is not None, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), self.layer.bias
        return layer


def lora(backbone: Any, *, rank: int = 128, alpha: float = 32.0, targets: str = "qk", keep: float = 1.0) -> nn.Module:
    """LoRA: low-rank adaptation of large language models (Hu et al., ICLR 2022), as PUMA (Kim et al. 2023) compares with it.

        W x + alpha / rank * g * B A x,    B = 0 at the start

    Differs from PUMA's code, which cannot run as released: B starts at zero there, too, as it is meant to, and the factor is alpha / rank.
    The original changes q and v (`targets="qv"`). `keep=0.5` is the stochastic variant: g = 0 or 1/keep for a sample in training, 1 in
    testing. Our own few lines and not peft's, which changes whole layers: timm's q, k and v are one layer.

    Args:
        backbone: a transformer of timm.
        rank: of the change.
        alpha: its weight.
        targets: which of `q`, `k` and `v` are changed.
        keep: probability that the change counts for a sample in training.
    """
    if not targets or len(set(targets)) != len(targets) or not set(targets) <= set("qkv"):
        raise UnimetricError(f"lora: `targets={targets!r}`", "write which of q, k and v are changed, such as `targets='qv'`")
    if not 0 < keep <= 1:
        raise UnimetricError(f"`keep={keep}` is no probability", "write a number above 0 and up to 1")
    for block in frozen_transformer(backbone).blocks:
        block.attn.qkv = LowRank(block.attn.qkv, rank=rank, scale=alpha / rank, targets=targets, keep=keep)
    return Adapted(backbone)
