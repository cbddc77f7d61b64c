"""Stochastic adapters and a prompt pool."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.adapters._prompts import Pool
from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.adapters.stochastic_adapter import branches


def puma(
    backbone: Any,
    *,
    rank: int = 128,
    keep: float = 0.5,
    scale: float = 0.1,
    layers: int = 0,
    scaled: bool = False,
    prompts: int = 20,
    length: int = 8,
) -> nn.Module:
    """PUMA: universal metric learning with parameter-efficient transfer learning (Kim et al. 2023).

    A `stochastic_adapter` beside every block and a `prompt_pool` at the input, in a frozen network: 2.44 M parameters for a ViT-S.

    Args:
        backbone: a transformer of timm.
        rank: width of the adapters' bottleneck.
        keep: probability that an adapter counts for a sample in training.
        scale: fixed factor on the adapters.
        layers: only the first so many blocks have adapters; 0 is all.
        scaled: as in `stochastic_adapter`.
        prompts: how many prompts there are.
        length: tokens of a prompt.
    """
    network = frozen_transformer(backbone)
    attention, mlp = branches(network, rank=rank, keep=keep, scale=scale, layers=layers)
    return Adapted(backbone, prompt=Pool(network.embed_dim, prompts=prompts, length=length), attention=attention, mlp=mlp, scaled=scaled)
