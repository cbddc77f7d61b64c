"""Bottleneck branch that is randomly switched off per sample."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from timm.layers import DropPath
from torch import Tensor, nn

from unimetric.adapters._vit import Normalized


class Bottleneck(nn.Module):
    """Bottleneck branch with a random gate per sample.

        gate * scale * (ReLU(x W_down + b_down) W_up + b_up)

    In training the gate is 1/keep with probability `keep` and 0 otherwise, drawn once per sample.
    In testing it is 1. W_up starts at zero, so the initial output is zero.

    Args:
        channels: Number of token channels C.
        rank: Width of the bottleneck.
        scale: Fixed factor on the output.
        keep: Probability that the branch is active for a sample in training, in (0, 1].
        bias: Whether to add b_down and b_up. If set, W_down is initialized like `nn.Linear`,
            otherwise uniformly within sqrt(3 / rank).
        normalised: Whether x is the output of the norm. If not, x is the residual stream before it.

    Shape:
        normal (B, N, C), stream (B, N, C) -> (B, N, C)
    """

    def __init__(self, channels: int, *, rank: int, scale: float, keep: float, bias: bool = False, normalised: bool = True) -> None:
        super().__init__()
        bound = math.sqrt(1 / channels) if bias else math.sqrt(3 / rank)
        self.down = nn.Parameter(torch.empty(channels, rank).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(rank, channels))
        self.down_bias = nn.Parameter(torch.zeros(rank)) if bias else None
        self.up_bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.scale, self.normalised = scale, normalised
        self.drop = DropPath(1 - keep)

    def forward(self, normal: Normalized, stream: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        given = normal if self.normalised else Normalized(stream, None, None, None)
        hidden = given.project(self.down, self.down_bias)
        # The gate is not negative, so it commutes with the ReLU. Applied before it, the gate multiplies the
        # narrow tensor, and no further tensor is stored for the backward pass.
        gate = draw_gates(self.drop, hidden)[0]
        out = nn.functional.relu(gate * hidden) @ (self.scale * self.up)
        return out if self.up_bias is None else out + gate * (self.scale * self.up_bias).to(out.dtype)


def draw_gates(drop: DropPath, hidden: Float[Tensor, "B N R"], *, targets: int = 1) -> Float[Tensor, "T B 1 1"]:
    """Draw one gate per target and sample.

    With several ranks, each draws the gates of the whole batch and uses those of its slice, as one rank would.

    Args:
        drop: Distribution of the gates.
        hidden: Tensor of the samples of this rank.
        targets: Number of gates per sample.
    """
    count, ranks, start = hidden.shape[0], 1, 0
    if drop.training and torch.distributed.is_initialized():
        ranks, start = torch.distributed.get_world_size(), torch.distributed.get_rank() * count
    gates = drop(hidden.new_ones(targets * ranks * count, 1, 1)).view(targets, ranks * count, 1, 1)
    return gates[:, start : start + count]
