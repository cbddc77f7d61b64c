"""Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from unimetric.arguments import NonNegative, Range


def adamw(
    groups: list[dict[str, Any]],
    *,
    lr: NonNegative = 1e-4,
    weight_decay: NonNegative = 1e-4,
    beta1: Annotated[float, Range(0, below=1)] = 0.9,
    beta2: Annotated[float, Range(0, below=1)] = 0.999,
    eps: NonNegative = 1e-8,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, with the values of PUMA (Kim et al. 2023).

        w <- w - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay w)

    Reference:
        Decoupled weight decay regularization (Loshchilov & Hutter, ICLR 2019).

    Args:
        groups: Parameter groups, each optionally with its learning rate and weight decay.
        lr: Learning rate.
        weight_decay: Rate of the weight decay.
        beta1: Decay rate of the mean gradient.
        beta2: Decay rate of the mean squared gradient.
        eps: Term that keeps the division finite.
    """
    fused = groups[0]["params"][0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps, fused=fused)
