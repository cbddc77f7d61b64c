"""Prompts that depend on the picture."""

from __future__ import annotations

from typing import Any

from torch import nn

from unimetric.adapters._prompts import Pool
from unimetric.adapters._vit import Adapted, frozen_transformer


def prompt_pool(backbone: Any, *, prompts: int = 20, length: int = 8) -> nn.Module:
    """Conditional prompt learning of PUMA (Kim et al. 2023), eqs. 6-10: a prompt mixed for each picture, before the first layer.

        q = (mean + max over the patch embeddings) / 2,  without gradient
        alpha_m = cos(q * softmax(A_m), K_m),    P = sum over m of alpha_m P_m
        tokens = [class, P, patches]

    As in the code, and not in the paper: the softmax on A, and the position of the class token added to the prompts. Left out of the
    code's: a BatchNorm that is never trained, and a regulariser of weight 1e-6 on K, A and P.

    Args:
        backbone: a transformer of timm.
        prompts: M, how many there are.
        length: tokens of a prompt.
    """
    network = frozen_transformer(backbone)
    return Adapted(backbone, prompt=Pool(network.embed_dim, prompts=prompts, length=length))
