"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch


def sgd(
    groups: list[dict[str, Any]], *, lr: float = 1e-2, weight_decay: float = 1e-4, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.Optimizer:
    """A stochastic approximation method (Robbins & Monro, 1951), with momentum (Polyak, 1964).

        u <- momentum u + g;  w <- w - lr u,  g including weight_decay w

    Args:
        groups: parameter groups, each with a learning rate and weight decay of its own if it has them.
        lr: learning rate.
        weight_decay: weight of the L2 penalty.
        momentum: memory of the direction.
        nesterov: look ahead along it.
    """
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
