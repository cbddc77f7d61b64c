"""Adam, with weight decay as an L2 penalty in the gradient."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from unimetric.arguments import NonNegative, Range


def adam(
    groups: list[dict[str, Any]],
    *,
    lr: NonNegative = 1e-5,
    weight_decay: NonNegative = 4e-4,
    beta1: Annotated[float, Range(0, below=1)] = 0.9,
    beta2: Annotated[float, Range(0, below=1)] = 0.999,
    eps: NonNegative = 1e-8,
) -> torch.optim.Optimizer:
    """Adam with the values of Roth et al. 2020.

        m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
        w <- w - lr m_hat / (sqrt(v_hat) + eps),  g including weight_decay w

    Reference:
        Adam: a method for stochastic optimization (Kingma & Ba, ICLR 2015).

    Args:
        groups: Parameter groups, each optionally with its learning rate and weight decay.
        lr: Learning rate.
        weight_decay: Weight of the L2 penalty.
        beta1: Decay rate of the mean gradient.
        beta2: Decay rate of the mean squared gradient.
        eps: Term that keeps the division finite.
    """
    # A GPU updates all parameters in one fused kernel instead of hundreds of small launches.
    fused = groups[0]["params"][0].is_cuda
    return torch.optim.Adam(groups, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps, fused=fused)
