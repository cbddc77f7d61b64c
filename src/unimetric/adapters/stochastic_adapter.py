"""Bottleneck branches parallel to every block, randomly switched off."""

from __future__ import annotations

from typing import Annotated, Any

from torch import nn

from unimetric.adapters._bottleneck import Bottleneck
from unimetric.adapters._vit import Adapted, adapted_layers, frozen_transformer
from unimetric.arguments import Count, Natural, Range, Real


def stochastic_adapter(
    backbone: Any,
    *,
    rank: Count = 128,
    keep: Annotated[float, Range(above=0, most=1)] = 0.5,
    scale: Real = 0.1,
    layers: Natural = 0,
    scaled: bool = False,
) -> nn.Module:
    """Insert PUMA's stochastic adapters into a frozen transformer.

        z' = z + MSA(LN1 z) + g' A'(LN1 z)
        z  = z' + MLP(LN2 z') + g A(LN2 z'),    A(x) = scale ReLU(x W_down) W_up

    In training g and g' are 1/keep with probability `keep` and 0 otherwise, drawn per sample, layer
    and half of a block. In testing they are 1, the mean of the training values. `keep=1` is the
    paper's static adapter. With `scaled`, blocks with LayerScale (LS) compute

        z' = z + LS1(MSA(LN1 z) + g' A'(LN1 z)),    z = z' + LS2(MLP(LN2 z') + g A(LN2 z'))

    and otherwise LS(MSA) + g' A' and LS(MLP) + g A.

    Differs from the paper:
        The factors 1/keep and `scale` are in the code but not in eq. 5. The two adapters of a layer
        are initialized separately; in the code they start with equal weights.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), eqs. 4-5.

    Args:
        backbone: Backbone with a timm vision transformer.
        rank: Width of the bottleneck, at least 1.
        keep: Probability that an adapter is active for a sample in training, in (0, 1].
        scale: Fixed factor on the adapters.
        layers: Number of blocks with adapters, counted from the input; 0 for all. The paper's ViT-L has 12.
        scaled: Whether LayerScale also applies to the adapters. The paper's networks have no
            LayerScale; DINOv2 does.

    Returns:
        The backbone with adapters, as a module with the same input and output shapes.
    """
    network = frozen_transformer(backbone)
    attention, mlp = branches(network, rank=rank, keep=keep, scale=scale, layers=layers)
    return Adapted(backbone, attention=attention, mlp=mlp, scaled=scaled)


def branches(network: Any, *, rank: int, keep: float, scale: float, layers: int) -> tuple[list[Bottleneck], list[Bottleneck]]:
    """Build the attention and the MLP adapters, one of each per adapted block."""
    count, channels = adapted_layers(network, layers), network.embed_dim
    made = [[Bottleneck(channels, rank=rank, scale=scale, keep=keep) for _ in range(count)] for _ in range(2)]
    return made[0], made[1]
