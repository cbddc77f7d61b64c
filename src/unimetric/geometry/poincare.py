"""Poincaré ball: exponential map at the origin, distances, and means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.geometry.sphere import length


def to_ball(x: Float[Tensor, "*N D"], *, curvature: float, clip: float | None = None) -> Float[Tensor, "*N D"]:
    """Clip the norm, then map into the Poincare ball of radius 1/sqrt(curvature).

        u = x min(1, clip / |x|);   z = tanh(sqrt(curvature) |u|) u / (sqrt(curvature) |u|)

    The map is the exponential map at the origin. Results stay a thousandth of the radius inside the
    boundary, where distances have no gradient.
    """
    root = math.sqrt(curvature)
    norm = length(x)
    if clip is not None:
        x = x * (clip / (norm + 1e-5)).clamp_max(1)
        norm = length(x)
    norm = norm.clamp_min(1e-5)
    return x * ((root * norm).tanh().clamp_max(1 - 1e-3) / (root * norm))


def poincare(a: Float[Tensor, "B D"], b: Float[Tensor, "R D"], *, curvature: float, epsilon: float = 1e-12) -> Float[Tensor, "B R"]:
    """Return the distances between points of the Poincare ball.

    The distance is 2/sqrt(c) artanh(sqrt(c) |-a (+) b|). (+) is the Moebius addition. The distances come from
    inner products, without a B x R x D tensor. The epsilon keeps the gradient finite at a = b.
    """
    aa, bb, ab = a.square().sum(-1)[:, None], b.square().sum(-1)[None, :], a @ b.T
    below = 1 - 2 * curvature * ab + curvature**2 * aa * bb
    # |-a (+) b|^2 is |a - b|^2 / below. The authors' code adds 1e-5 to the denominator of the addition.
    norm = (((aa + bb - 2 * ab).clamp_min(0) + epsilon) * below.clamp_min(epsilon)).sqrt() / (below + 1e-5)
    root = math.sqrt(curvature)
    return 2 / root * (root * norm).clamp_max(1 - 1e-5).atanh()


def poincare_mean(points: Sequence[Float[Tensor, "N D"]], *, curvature: float) -> Float[Tensor, "N D"]:
    """Return the mean of corresponding points of the Poincare ball.

        k = sum_m l_m x_m / sum_m (l_m - 1),   l_m = 2 / (1 - c |x_m|^2);   mean = k / (1 + sqrt(1 - c |k|^2))

    This is the Einstein midpoint: the mean in the Klein model, weighted by the Lorentz factors l_m - 1.

    Args:
        points: Points of each member of the mean.
        curvature: Curvature c of the Poincare ball.
    """
    total, weight = torch.zeros_like(points[0]), torch.zeros_like(points[0][:, :1])
    for each in points:
        factor = 2 / (1 - curvature * each.square().sum(-1, keepdim=True))
        total, weight = total + factor * each, weight + factor - 1
    klein = total / weight
    return klein / (1 + (1 - curvature * klein.square().sum(-1, keepdim=True)).clamp_min(0).sqrt())
