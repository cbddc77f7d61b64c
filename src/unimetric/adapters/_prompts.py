"""Trainable prompt tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import upcast_half


class Pool(nn.Module):
    """Pool of prompts, mixed per image by the cosine similarity to their keys.

    The tokens receive the position embedding of the class token (`placed`).

    Args:
        channels: Number of token channels C.
        prompts: Number of prompts M.
        length: Number of tokens per prompt P.

    Shape:
        patches (B, N, C) -> prompt tokens (B, P, C) in the first layer, None in later layers
    """

    placed = True

    def __init__(self, channels: int, *, prompts: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.keys = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, channels)))
        self.attention = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, channels)))
        one = nn.init.orthogonal_(torch.empty(length, channels))
        self.prompts = nn.Parameter(one.repeat(prompts, 1, 1))

    def preference(self, patches: Float[Tensor, "B N C"]) -> Float[Tensor, "B M"]:
        """Return the weight of each prompt per image, computed in float32.

        The weight is the cosine similarity between the attended query and the key of the prompt.
        """
        with torch.autocast(patches.device.type, enabled=False):
            values = upcast_half(patches.detach())
            query = (values.mean(1) + values.amax(1)) / 2
            weight = self.attention.softmax(1)
            # Computes cos(q * a, k) without the (B, M, C) attended queries: both sums over C are matrix products.
            likeness = query @ (weight * F.normalize(self.keys)).T
            length = (query.square() @ weight.square().T).sqrt()
            return likeness / length.clamp_min(1e-12)

    def forward(self, patches: Float[Tensor, "B N C"], layer: int) -> Float[Tensor, "B P C"] | None:
        if layer:
            return None
        with torch.autocast(patches.device.type, enabled=False):
            return (self.preference(patches) @ self.prompts.flatten(1)).view(patches.shape[0], self.length, -1)


class Tokens(nn.Module):
    """Prompt tokens that are the same for every image.

    Args:
        channels: Number of token channels C.
        length: Number of tokens P.
        bound: Half-width of the uniform initial distribution.
        layers: Number of layers with separate tokens. With 1, the tokens of the first layer pass
            through all layers.
        placed: Whether the tokens receive the position embedding of the class token.

    Shape:
        patches (B, N, C) -> prompt tokens (B, P, C), None from layer `layers` on
    """

    def __init__(self, channels: int, *, length: int, bound: float, layers: int, placed: bool) -> None:
        super().__init__()
        self.placed = placed
        self.tokens = nn.Parameter(torch.empty(layers, length, channels).uniform_(-bound, bound))

    def forward(self, patches: Float[Tensor, "B N C"], layer: int) -> Float[Tensor, "B P C"] | None:
        return self.tokens[layer].expand(patches.shape[0], -1, -1) if layer < len(self.tokens) else None
