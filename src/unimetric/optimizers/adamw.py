"""Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch


def adamw(
    groups: list[dict[str, Any]],
    *,
    lr: float = 1e-4,
    weight_decay: float = 1e-4,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Decoupled weight decay regularization (Loshchilov & Hutter, ICLR 2019), with the values of PUMA (Kim et al. 2023).

        w <- w - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay w)

    Args:
        groups: parameter groups, each with a learning rate and weight decay of its own if it has them.
        lr: learning rate.
        weight_decay: how fast weights shrink.
        beta1: memory of the mean.
        beta2: memory of the square.
        eps: keeps the division finite.
    """
    fused = groups[0]["params"][0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps, fused=fused)
