"""Tokens that are learnt, and join those of the picture."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class Pool(nn.Module):
    """A pool of prompts, mixed for each picture by its likeness to their keys: (B, N, C) patches -> (B, P, C) prompt tokens.

    Args:
        channels: C of the tokens.
        prompts: M, how many there are.
        length: P, tokens of a prompt.
    """

    placed = True  # they get the position of the class token

    def __init__(self, channels: int, *, prompts: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.keys = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, channels)))
        self.attention = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, channels)))
        one = nn.init.orthogonal_(torch.empty(length, channels))
        self.prompts = nn.Parameter(one.repeat(prompts, 1, 1))

    def preference(self, patches: Float[Tensor, "B N C"]) -> Float[Tensor, "B M"]:
        """How much of each prompt a picture takes: the cosine of its attended query and the prompt's key, in float32."""
        with torch.autocast(patches.device.type, enabled=False):
            values = patches.detach().float() if patches.dtype in (torch.bfloat16, torch.float16) else patches.detach()
            query = (values.mean(1) + values.amax(1)) / 2
            weight = self.attention.softmax(1)
            # cos(q * a, k) without the (B, M, C) of attended queries: both of its sums over C are matrix products.
            likeness = query @ (weight * F.normalize(self.keys)).T
            length = (query.square() @ weight.square().T).sqrt()
            return likeness / length.clamp_min(1e-12)

    def forward(self, patches: Float[Tensor, "B N C"], layer: int) -> Float[Tensor, "B P C"] | None:
        if layer:
            return None
        with torch.autocast(patches.device.type, enabled=False):
            return (self.preference(patches) @ self.prompts.flatten(1)).view(len(patches), self.length, -1)


class Tokens(nn.Module):
    """The same prompt tokens for every picture.

    Args:
        channels: C of the tokens.
        length: P, how many tokens.
        bound: they start uniform within it.
        layers: how many layers have tokens of their own; at 1 those of the first go on through all.
    """

    placed = False

    def __init__(self, channels: int, *, length: int, bound: float, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(layers, length, channels).uniform_(-bound, bound))

    def forward(self, patches: Float[Tensor, "B N C"], layer: int) -> Float[Tensor, "B P C"] | None:
        return self.tokens[layer].expand(len(patches), -1, -1) if layer < len(self.tokens) else None
