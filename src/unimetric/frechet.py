"""The Frechet distance between Gaussians, for many of them at once and on any device.

    F = |mu - mu*|^2 + tr S + tr S* - 2 tr (S S*)^(1/2)

The root is never formed. Where S = X^T X, the trace of (S S*)^(1/2) is that of the root of the positive semi-definite X S* X^T, that is,
the sum of the square roots of its eigenvalues: real without cutting off an imaginary part, exact where S is singular, and no larger than
there are points.

m Gaussians, P points each, D dimensions. Computed in float64, whatever comes in: the costs of random subsets differ in the third digit,
and float64 is out of reach of autocast and of TF32.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def gaussian(points: Float[Tensor, "*m P D"]) -> tuple[Float[Tensor, "*m D"], Float[Tensor, "*m D D"]]:
    """Mean and unbiased covariance."""
    mean, centred = centre(points)
    return mean, centred.mT @ centred


def frechet(
    mean: Float[Tensor, "*m D"], covariance: Float[Tensor, "*m D D"], other_mean: Float[Tensor, "D"], other_covariance: Float[Tensor, "D D"]
) -> Float[Tensor, "*m"]:
    """The distance of each Gaussian from one other, by their moments.

    Args:
        mean, covariance: of the Gaussians.
        other_mean, other_covariance: of the other.
    """
    values, vectors = torch.linalg.eigh(other_covariance.double())
    root = vectors * values.clamp_min(0).sqrt()  # root @ root.T is the covariance
    product = root.mT @ covariance.double() @ root
    return _assemble(mean, covariance.double().diagonal(dim1=-2, dim2=-1).sum(-1), other_mean, other_covariance, product)


def frechet_of_points(
    points: Float[Tensor, "*m P D"], other_mean: Float[Tensor, "D"], other_covariance: Float[Tensor, "D D"]
) -> Float[Tensor, "*m"]:
    """The distance of the Gaussian of each set of points from one other. Waits for nothing; quickest where P is below D.

    Args:
        points: the sets of points.
        other_mean, other_covariance: of the other Gaussian.
    """
    mean, centred = centre(points)
    product = centred @ other_covariance.double() @ centred.mT
    return _assemble(mean, centred.square().sum((-2, -1)), other_mean, other_covariance, product)


def trace_of_root(matrix: Float[Tensor, "*m P P"]) -> Float[Tensor, "*m"]:
    """tr A^(1/2) of positive semi-definite matrices: by eigenvalues on the CPU, by Newton-Schulz iterations on a GPU.

    A GPU finds eigenvalues slowly, and torch waits for it to ask whether they converged.
    """
    return newton_schulz(matrix) if matrix.is_cuda else eigenvalue_roots(matrix)


def eigenvalue_roots(matrix: Float[Tensor, "*m P P"]) -> Float[Tensor, "*m"]:
    """tr A^(1/2) of positive semi-definite matrices: the sum of the roots of their eigenvalues, to the last digits."""
    return root_sum(torch.linalg.eigvalsh(matrix))


def root_sum(values: Float[Tensor, "*m P"]) -> Float[Tensor, "*m"]:
    """The sum of the roots of eigenvalues, given in ascending order."""
    # What is zero comes out as rounding of the largest, and the root would make much of it.
    zero = values[..., -1:] * values.shape[-1] * torch.finfo(values.dtype).eps
    return torch.where(values > zero, values, 0).sqrt().sum(-1)


def newton_schulz(matrix: Float[Tensor, "*m P P"], *, smallest: float = 1e-5) -> Float[Tensor, "*m"]:
    """tr A^(1/2) of positive semi-definite matrices by products of matrices alone, all of one shape (Chen and Chow 2014).

        Y = scale Y (3 - scale^2 Z)/2,   Z = (scale (3 - scale^2 Z)/2)^2 Z,    from  Y = 1, Z = A;   then  Z -> 1  and  Y A -> A^(1/2)

    Each step maps the singular values [low, 1] of A^(1/2) onto [low', 1], with the scale that makes low' largest. The sequence of scales
    depends on the first low only, so that nothing is asked of the device.

    Args:
        matrix: the matrices A.
        smallest: singular values of A^(1/2) below this fraction of its norm are counted in part only; in sum they are as good as nothing.
    """
    size = matrix.shape[-1]
    flat = matrix.reshape(-1, size, size)
    norm = flat.square().sum((1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(matrix.dtype).tiny)
    scaled = flat / norm
    # Z and Y side by side: one product with a wide matrix serves both.
    both = torch.cat([scaled, torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(scaled)], 2)
    low = smallest
    while low < 1 - 1e-6:
        square = 3 / (1 + low + low * low)
        first, third = 1.5 * square**0.5, 0.5 * square**1.5
        z = both[:, :, :size]
        both = torch.baddbmm(both, z, both, beta=first, alpha=-third)
        half = both[:, :, :size]
        both[:, :, :size] = torch.baddbmm(half, z, half, beta=first, alpha=-third)
        low = first * low - third * low**3
    return ((both[:, :, size:] * scaled).sum((1, 2)) * norm[:, 0, 0].sqrt()).reshape(matrix.shape[:-2])


def centre(points: Float[Tensor, "*m P D"]) -> tuple[Float[Tensor, "*m D"], Float[Tensor, "*m P D"]]:
    """Mean, and X with X^T X the covariance."""
    points = points.double()
    mean = points.mean(-2)
    return mean, (points - mean.unsqueeze(-2)) / (points.shape[-2] - 1) ** 0.5


def _assemble(mean: Tensor, trace: Tensor, other_mean: Tensor, other_covariance: Tensor, product: Tensor) -> Tensor:
    shift = (mean.double() - other_mean.double()).square().sum(-1)
    return shift + trace + other_covariance.double().trace() - 2 * trace_of_root((product + product.mT) / 2)
