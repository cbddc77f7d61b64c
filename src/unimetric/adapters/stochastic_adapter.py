"""Bottlenecks beside every block, switched off at random."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.adapters._bottleneck import Bottleneck
from unimetric.adapters._vit import Adapted, adapted_layers, frozen_transformer


def stochastic_adapter(
    backbone: Any, *, rank: int = 128, keep: float = 0.5, scale: float = 0.1, layers: int = 0, scaled: bool = False
) -> nn.Module:
    """The stochastic adapter of PUMA (Universal metric learning with parameter-efficient transfer learning, Kim et al. 2023), eqs. 4-5.

        z' = z + MSA(LN1 z) + g' A'(LN1 z)
        z  = z' + MLP(LN2 z') + g A(LN2 z'),    A(x) = scale ReLU(x W_down) W_up

    with g, g' = 0 or 1/keep for each sample, layer and half of a block in training, and 1 in testing: what a sample gets is on average
    what it gets in testing. `keep=1` is the paper's static adapter. With `scaled`, in blocks that have LayerScale (LS),

        z' = z + LS1(MSA(LN1 z) + g' A'(LN1 z)),    z = z' + LS2(MLP(LN2 z') + g A(LN2 z'))

    and without it LS(MSA) + g' A', LS(MLP) + g A.

    Differs from the paper: eq. 5 has no 1/keep and no scale; both are the code's. The two adapters of a layer are drawn one by one; in
    the code they start alike.

    Args:
        backbone: a transformer of timm.
        rank: width of the bottleneck.
        keep: probability that an adapter counts for a sample in training.
        scale: fixed factor.
        layers: only the first so many blocks have adapters (12 for the paper's ViT-L); 0 is all.
        scaled: LayerScale, where a block has it (DINOv2), scales the adapter, too; the paper's networks have none.
    """
    network = frozen_transformer(backbone)
    attention, mlp = branches(network, rank=rank, keep=keep, scale=scale, layers=layers)
    return Adapted(backbone, attention=attention, mlp=mlp, scaled=scaled)


def branches(network: Any, *, rank: int, keep: float, scale: float, layers: int) -> tuple[list[Bottleneck], list[Bottleneck]]:
    """An adapter beside the attention and one beside the MLP, for each block that gets them."""
    count, channels = adapted_layers(network, layers), network.embed_dim
    made = [[Bottleneck(channels, rank=rank, scale=scale, keep=keep) for _ in range(count)] for _ in range(2)]
    return made[0], made[1]
