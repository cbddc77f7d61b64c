"""Adam, whose weight decay is an L2 penalty inside the gradient."""

from __future__ import annotations

from typing import Any

import torch


def adam(
    groups: list[dict[str, Any]],
    *,
    lr: float = 1e-5,
    weight_decay: float = 4e-4,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Adam (Kingma & Ba, ICLR 2015), with the values of Roth et al. 2020.

        m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;  w <- w - lr m_hat / (sqrt(v_hat) + eps),  g including weight_decay w

    Args:
        groups: parameter groups, each with a learning rate and weight decay of its own if it has them.
        lr: learning rate.
        weight_decay: weight of the L2 penalty.
        beta1: memory of the mean.
        beta2: memory of the square.
        eps: keeps the division finite.
    """
    # One fused kernel for all parameters where the device has it: hundreds of small launches otherwise.
    fused = groups[0]["params"][0].is_cuda
    return torch.optim.Adam(groups, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps, fused=fused)
