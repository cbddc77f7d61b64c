"""AdaptFormer: bottleneck branches parallel to the MLPs."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.adapters._bottleneck import Bottleneck
from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.arguments import Count, Real


def adaptformer(backbone: Any, *, rank: Count = 256, scale: Real = 0.1, normalised: bool = True) -> nn.Module:
    """Insert AdaptFormer's bottleneck branches parallel to the MLPs of a frozen transformer.

        z = z' + MLP(LN2 z') + scale (ReLU(LN2 z' W_down + b_down) W_up + b_up)

    W_up and the biases start at zero, so the adapted network initially equals the frozen one. The
    default rank gives as many parameters as PUMA's adapters have.

    Differs from the paper:
        The paper's branch reads z' (`normalised=False`) and uses dropout, which is omitted here.
        PUMA's code (Kim et al. 2023) reads LN2 z'. It also sets W_up to zero, but a later call to
        `init_weights` draws W_down and W_up from a truncated normal distribution with standard
        deviation 0.02. In that code the branch therefore starts nonzero.

    Reference:
        AdaptFormer: adapting vision transformers for scalable visual recognition (Chen et al., NeurIPS 2022).

    Args:
        backbone: Backbone with a timm vision transformer.
        rank: Width of the bottleneck, at least 1.
        scale: Fixed factor on the branch.
        normalised: Whether the branch reads LN2 z' instead of z'.

    Returns:
        The backbone with branches, as a module with the same input and output shapes.
    """
    network = frozen_transformer(backbone)
    made = [Bottleneck(network.embed_dim, rank=rank, scale=scale, keep=1.0, bias=True, normalised=normalised) for _ in network.blocks]
    return Adapted(backbone, mlp=made)
