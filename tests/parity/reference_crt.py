"""The equations of CRT (Kan et al. 2022) as printed, in plain float64 loops. There is no public code of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_puma import gelu


def residual(x: Tensor, prototype: Tensor) -> Tensor:
    """Eq. 1: positions (N, L) and one prototype (L,) to r_k (L,)."""
    total = torch.zeros_like(prototype)
    for row in x:
        total = total + (1 + (row @ prototype).exp()).log() * (row - prototype)
    return total


def hidden(x: Tensor, prototypes: Tensor, weights: Tensor, biases: Tensor) -> list[Tensor]:
    """The first layer of every Gamma_k, of one image."""
    return [residual(x, c) @ w + b[0] for c, w, b in zip(prototypes, weights, biases, strict=True)]


def embedding(layers: list[Tensor], weights: Tensor, bias: Tensor) -> Tensor:
    """Eq. 2: the mean over k of the second layer after GELU; the K biases have one mean."""
    return sum(gelu(layer) @ w for layer, w in zip(layers, weights, strict=True)) / len(layers) + bias


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return x @ y / x.norm() / y.norm()


def diversity(prototypes: Tensor) -> Tensor:
    """Eq. 3."""
    count, total = len(prototypes), torch.zeros((), dtype=prototypes.dtype)
    for k in range(count):
        for j in range(count):
            if k != j:
                total = total + cosine(prototypes[k], prototypes[j]).abs()
    return total / (count * (count - 1))


def consistency(first: Tensor, second: Tensor) -> Tensor:
    """Eqs. 4 and 5: the sum over all B x B entries."""
    total = torch.zeros((), dtype=first.dtype)
    for i in range(len(first)):
        for j in range(len(first)):
            total = total + (cosine(first[i], first[j]) - cosine(second[i], second[j])).abs()
    return total
