"""A small branch through a bottleneck, switched off at random for whole samples."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from timm.layers import DropPath
from torch import Tensor, nn

from unimetric.adapters._vit import Normalised
from unimetric.errors import UnimetricError


class Bottleneck(nn.Module):
    """(B, N, C) -> (B, N, C)

        gate * scale * (ReLU(x W_down + b_down) W_up + b_up)

    The gate is 0 or 1/keep for a sample, drawn anew in training, and 1 in testing. W_up starts at zero, so the branch starts as nothing.

    Args:
        channels: of the tokens.
        rank: width of the bottleneck.
        scale: fixed factor.
        keep: probability that a sample goes through in training.
        bias: with b_down and b_up; W_down then starts as torch's linear layers do, else uniform within sqrt(3 / rank).
        normalised: x is the norm's output; else the stream before the norm.
    """

    def __init__(self, channels: int, *, rank: int, scale: float, keep: float, bias: bool = False, normalised: bool = True) -> None:
        super().__init__()
        if not 0 < keep <= 1:
            raise UnimetricError(f"`keep={keep}` is no probability", "write a number above 0 and up to 1")
        bound = math.sqrt(1 / channels) if bias else math.sqrt(3 / rank)
        self.down = nn.Parameter(torch.empty(channels, rank).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(rank, channels))
        self.down_bias = nn.Parameter(torch.zeros(rank)) if bias else None
        self.up_bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.scale, self.normalised = scale, normalised
        self.drop = DropPath(1 - keep)

    def forward(self, normal: Normalised, stream: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        given = normal if self.normalised else Normalised(stream, None, None, None)
        hidden = given.project(self.down, self.down_bias)
        # The gate is not negative, so it may go in front of the ReLU, where the tensor is narrow and nothing more need be kept.
        gate = self.drop(hidden.new_ones(len(hidden), 1, 1))
        out = nn.functional.relu(gate * hidden) @ (self.scale * self.up)
        return out if self.up_bias is None else out + gate * (self.scale * self.up_bias).to(out.dtype)
