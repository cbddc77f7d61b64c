"""Visual prompt tuning: trainable tokens in addition to those of the image."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from unimetric.adapters._prompts import Tokens
from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.arguments import Count
from unimetric.errors import UnimetricError


def vpt(backbone: Any, *, length: Count = 8, deep: bool = False, placed: bool = False) -> nn.Module:
    """Insert trainable prompt tokens into a frozen transformer.

        shallow:  tokens = [class, P, patches] enter the first layer
        deep:     every layer replaces the P of the previous layer with a separate P

    P starts uniformly distributed within sqrt(6 / (3 patch^2 + C)). The default of 8 tokens is PUMA's (Kim et al. 2023).

    Differs from the paper:
        With `placed=True`, P receives the position embedding of the class token, as in PUMA's code
        (`vision_transformer.py`, line 647). PUMA's code also uses 196, the number of patches, in
        place of patch^2. Its deep tokens have no position embedding.

    Reference:
        Visual prompt tuning (Jia et al., ECCV 2022).

    Args:
        backbone: Backbone with a timm vision transformer.
        length: Number of prompt tokens per layer, at least 1.
        deep: Whether every layer has separate tokens.
        placed: Whether the tokens receive the position embedding of the class token. Requires
            `deep=False`. No effect if the network has no such embedding.

    Returns:
        The backbone with tokens, as a module with the same input and output shapes.
    """
    if deep and placed:
        raise UnimetricError("vpt: `placed=True` requires `deep=False`: deep tokens have no position", "drop one of `placed` and `deep`")
    network = frozen_transformer(backbone)
    layers = len(network.blocks) if deep else 1
    return Adapted(backbone, prompt=plain_tokens(network, length=length, layers=layers, placed=placed))


def plain_tokens(network: Any, *, length: int, layers: int, placed: bool) -> Tokens:
    """Build prompt tokens with the initial range of VPT."""
    height, width = network.patch_embed.patch_size
    bound = math.sqrt(6 / (3 * height * width + network.embed_dim))
    return Tokens(network.embed_dim, length=length, bound=bound, layers=layers, placed=placed)
