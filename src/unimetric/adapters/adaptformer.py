"""Bottlenecks beside the MLPs."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.adapters._bottleneck import Bottleneck
from unimetric.adapters._vit import Adapted, frozen_transformer


def adaptformer(backbone: Any, *, rank: int = 256, scale: float = 0.1, normalised: bool = True) -> nn.Module:
    """AdaptFormer: adapting vision transformers for scalable visual recognition (Chen et al., NeurIPS 2022).

        z = z' + MLP(LN2 z') + scale (ReLU(LN2 z' W_down + b_down) W_up + b_up)

    With the rank that PUMA (Kim et al. 2023) gives it to have as many parameters as its own adapters, and LN2 as in PUMA's code. The
    original's input is z' itself (`normalised=False`), with dropout, which is left out here.

    Args:
        backbone: a transformer of timm.
        rank: width of the bottleneck.
        scale: fixed factor.
        normalised: the branch sees LN2 z', else z'.
    """
    network = frozen_transformer(backbone)
    made = [Bottleneck(network.embed_dim, rank=rank, scale=scale, keep=1.0, bias=True, normalised=normalised) for _ in network.blocks]
    return Adapted(backbone, mlp=made)
