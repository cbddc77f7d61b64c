"""Prompt tokens that depend on the image."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.adapters._prompts import Pool
from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.arguments import Count


def prompt_pool(backbone: Any, *, prompts: Count = 20, length: Count = 8) -> nn.Module:
    """Insert PUMA's conditional prompt before the first layer of a frozen transformer.

        q = (mean + max over the patch embeddings) / 2,  without gradient
        alpha_m = cos(q * softmax(A_m), K_m),    P = sum over m of alpha_m P_m
        tokens = [class, P, patches]

    A pool of one prompt is not a plain prompt: alpha_1 still scales its tokens. `vpt` inserts plain tokens.

    Differs from the paper:
        The softmax of A and the class token's position embedding on the prompts follow the code.
        The code's BatchNorm without training and its regularizer of weight 1e-6 on K, A and P are omitted.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), eqs. 6-10.

    Args:
        backbone: Backbone with a timm vision transformer.
        prompts: Number of prompts M, at least 1.
        length: Number of tokens per prompt, at least 1.

    Returns:
        The backbone with a prompt pool, as a module with the same input and output shapes.
    """
    network = frozen_transformer(backbone)
    return Adapted(backbone, prompt=Pool(network.embed_dim, prompts=prompts, length=length))
