"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from unimetric.arguments import NonNegative, Range


def sgd(
    groups: list[dict[str, Any]],
    *,
    lr: NonNegative = 1e-2,
    weight_decay: NonNegative = 1e-4,
    momentum: Annotated[float, Range(0, below=1)] = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum (Polyak, 1964).

        u <- momentum u + g;  w <- w - lr u,  g including weight_decay w

    Reference:
        A stochastic approximation method (Robbins & Monro, 1951).

    Args:
        groups: Parameter groups, each optionally with its learning rate and weight decay.
        lr: Learning rate.
        weight_decay: Weight of the L2 penalty.
        momentum: Decay rate of the direction.
        nesterov: Whether to use Nesterov momentum.
    """
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
