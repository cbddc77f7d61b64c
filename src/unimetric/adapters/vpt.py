"""Learnt tokens among those of the picture."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from unimetric.adapters._prompts import Tokens
from unimetric.adapters._vit import Adapted, frozen_transformer


def vpt(backbone: Any, *, length: int = 8, deep: bool = False) -> nn.Module:
    """Visual prompt tuning (Jia et al., ECCV 2022), with the 8 tokens of PUMA's comparison (Kim et al. 2023).

        shallow:  tokens = [class, P, patches] enter the first layer
        deep:     every layer gets its own P in the place of the last one's

    P starts uniform within sqrt(6 / (3 patch^2 + C)), as in the original; PUMA's code has the 196 positions for patch^2.

    Args:
        backbone: a transformer of timm.
        length: tokens of a prompt.
        deep: a prompt for each layer.
    """
    network = frozen_transformer(backbone)
    height, width = network.patch_embed.patch_size
    bound = math.sqrt(6 / (3 * height * width + network.embed_dim))
    return Adapted(backbone, prompt=Tokens(network.embed_dim, length=length, bound=bound, layers=len(network.blocks) if deep else 1))
