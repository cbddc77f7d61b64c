"""Fréchet distance between Gaussians, for many of them at once and on any device.

    F = |mu - mu*|^2 + tr S + tr S* - 2 tr (S S*)^(1/2)

The root is not computed. If S = X^T X, the trace of (S S*)^(1/2) is the sum of the square roots of
the eigenvalues of the positive semi-definite X S* X^T. That matrix is real, exact for a singular S,
and has at most as many rows as there are points.

m Gaussians, P points each, D dimensions. All inputs are converted to float64, because the costs of
random subsets differ in the third digit. Neither autocast nor TF32 applies to float64.
"""

from __future__ import annotations

import scipy.linalg
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError


def gaussian(points: Float[Tensor, "*m P D"]) -> tuple[Float[Tensor, "*m D"], Float[Tensor, "*m D D"]]:
    """Return the mean and the unbiased covariance of each set of points."""
    mean, centered = center(points)
    return mean, centered.mT @ centered


def frechet(
    mean: Float[Tensor, "*m D"], covariance: Float[Tensor, "*m D D"], other_mean: Float[Tensor, "D"], other_covariance: Float[Tensor, "D D"]
) -> Float[Tensor, "*m"]:
    """Return the distance of each Gaussian from one other Gaussian, by their moments.

    Args:
        mean, covariance: Moments of the Gaussians.
        other_mean, other_covariance: Moments of the other Gaussian.
    """
    values, vectors = torch.linalg.eigh(other_covariance.double())
    root = vectors * values.clamp_min(0).sqrt()  # root @ root.T is the covariance
    product = root.mT @ covariance.double() @ root
    return _assemble(mean, covariance.double().diagonal(dim1=-2, dim2=-1).sum(-1), other_mean, other_covariance, product)


def frechet_of_points(
    points: Float[Tensor, "*m P D"], other_mean: Float[Tensor, "D"], other_covariance: Float[Tensor, "D D"]
) -> Float[Tensor, "*m"]:
    """Return the distance of the Gaussian of each set of points from one other Gaussian.

    Does not synchronize with the GPU. Fastest if P is below D.

    Args:
        points: Sets of points.
        other_mean, other_covariance: Moments of the other Gaussian.
    """
    mean, centered = center(points)
    product = centered @ other_covariance.double() @ centered.mT
    return _assemble(mean, centered.square().sum((-2, -1)), other_mean, other_covariance, product)


def eigenvalue_roots(matrix: Float[Tensor, "*m P P"]) -> Float[Tensor, "*m"]:
    """Return tr A^(1/2) of positive semi-definite matrices from their eigenvalues.

    The result has full precision.
    """
    return root_sum(torch.linalg.eigvalsh(matrix))


def root_sum(values: Float[Tensor, "*m P"]) -> Float[Tensor, "*m"]:
    """Return the sum of the square roots of eigenvalues, which must be in ascending order."""
    # An exact zero is computed as a rounding error of the largest value; its root would be large.
    zero = values[..., -1:] * values.shape[-1] * torch.finfo(values.dtype).eps
    return torch.where(values > zero, values, 0).sqrt().sum(-1)


def newton_schulz(matrix: Float[Tensor, "*m P P"]) -> Float[Tensor, "*m"]:
    """Return tr A^(1/2) of positive semi-definite matrices by the Newton-Schulz iteration.

    All steps are matrix products of one shape.

        Y = scale Y (3 - scale^2 Z)/2,   Z = (scale (3 - scale^2 Z)/2)^2 Z
        from  Y = 1, Z = A;   then  Z -> 1  and  Y A -> A^(1/2)

    Each step maps the singular values [low, 1] of A^(1/2) onto [low', 1], with the scale that makes
    low' largest. The sequence of scales depends only on the first low, so nothing synchronizes with
    the GPU.

    Reference:
        Chen and Chow 2014.
    """
    size = matrix.shape[-1]
    flat = matrix.reshape(-1, size, size)
    norm = flat.square().sum((1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(matrix.dtype).tiny)
    scaled = flat / norm
    # Z and Y are adjacent, so that one product with a wide matrix updates both.
    both = torch.cat([scaled, torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(scaled)], 2)
    low = 1e-5  # singular values of A^(1/2) below this fraction of the norm count only in part; their sum is negligible
    while low < 1 - 1e-6:
        square = 3 / (1 + low + low * low)
        first, third = 1.5 * square**0.5, 0.5 * square**1.5
        z = both[:, :, :size]
        both = torch.baddbmm(both, z, both, beta=first, alpha=-third)
        half = both[:, :, :size]
        both[:, :, :size] = torch.baddbmm(half, z, half, beta=first, alpha=-third)
        low = first * low - third * low**3
    return ((both[:, :, size:] * scaled).sum((1, 2)) * norm[:, 0, 0].sqrt()).reshape(matrix.shape[:-2])


def center(points: Float[Tensor, "*m P D"]) -> tuple[Float[Tensor, "*m D"], Float[Tensor, "*m P D"]]:
    """Return the mean, and the matrix X for which X^T X is the covariance."""
    points = points.double()
    mean = points.mean(-2)
    return mean, (points - mean.unsqueeze(-2)) / (points.shape[-2] - 1) ** 0.5


def _assemble(mean: Tensor, trace: Tensor, other_mean: Tensor, other_covariance: Tensor, product: Tensor) -> Tensor:
    shift = (mean.double() - other_mean.double()).square().sum(-1)
    matrix = (product + product.mT) / 2
    # Eigenvalues are slow on a GPU, and torch synchronizes to check their convergence.
    root = newton_schulz(matrix) if matrix.is_cuda else eigenvalue_roots(matrix)
    return shift + trace + other_covariance.double().trace() - 2 * root


def frechet_distance(points: Float[Tensor, "*m P D"], others: Float[Tensor, "*m Q D"]) -> Float[Tensor, "*m"]:
    """Return the Frechet distance between the Gaussians of two sets of points.

        F = |mu - mu*|^2 + tr S + tr S* - 2 tr (S S*)^(1/2)

    With the centered points, S = X^T X and S* = Y^T Y, and the last trace is the sum of the
    singular values of X Y^T. For few points, that matrix is small in any dimension, and nothing is
    squared. Hundreds of classes in 2,048 dimensions take milliseconds. For many points, the trace
    comes from the symmetric eigenproblem of L^T S L, with L L^T = S*.

    Differs from the authors' code:
        No matrix root is formed. Singular covariances therefore need no 1e-8 on their diagonals,
        and no imaginary part has to be dropped.

    Reference:
        Heusel et al., NeurIPS 2017, as used by Milbich et al. 2021.

    Args:
        points, others: The two sets, with at least two points each. Leading dimensions are batch
            dimensions. Any floating type; computed in float64.
    """
    for one in (points, others):
        if one.shape[-2] < 2:
            raise UnimetricError(
                f"a covariance needs at least 2 points, got {one.shape[-2]}", "use at least two points (or classes) per Gaussian"
            )
    (mean, own), (other_mean, other) = center(points), center(others)
    spread = own.square().sum((-2, -1)) + other.square().sum((-2, -1))
    dim = own.shape[-1]
    if own.shape[-2] * other.shape[-2] <= dim * dim:
        shared = torch.linalg.svdvals(own @ other.mT).sum(-1)
    elif own.is_cuda:
        across = own @ _factor(other.mT @ other)
        shared = eigenvalue_roots(across.mT @ across)
    else:
        pairs = zip(own.reshape(-1, *own.shape[-2:]), other.reshape(-1, *other.shape[-2:]), strict=True)
        shared = torch.stack([_roots_of_product(*pair) for pair in pairs]).reshape(own.shape[:-2])
    return (mean - other_mean).square().sum(-1) + spread - 2 * shared


def _roots_of_product(own: Float[Tensor, "P D"], other: Float[Tensor, "Q D"]) -> Float[Tensor, ""]:
    """Return tr (S S*)^(1/2) of centered points.

    Solves LAPACK's symmetric eigenproblem S S* v = lambda v.
    """
    # numpy computes half of a symmetric product and mirrors it.
    covariance, other_covariance = (points.numpy().T @ points.numpy() for points in (own, other))
    try:
        values = scipy.linalg.eigh(covariance, other_covariance, type=2, eigvals_only=True, driver="gv", check_finite=False)
    except scipy.linalg.LinAlgError:  # the other covariance is singular
        across = own @ _factor(torch.from_numpy(other_covariance))
        return eigenvalue_roots(across.mT @ across)
    return root_sum(torch.from_numpy(values))


def _factor(covariance: Float[Tensor, "*m D D"]) -> Float[Tensor, "*m D D"]:
    """Return L with L L^T = S, from Cholesky, or from the eigendecomposition if S is singular."""
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return lower
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def class_means(features: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int) -> Float[Tensor, "K D"]:
    """Return the mean feature of each class in float64.

    Milbich et al. 2021 compute the shift between these means, one point per class.

    Args:
        features: One row per image, not normalized.
        labels: (N,) class of each image.
        classes: Number of classes K.
    """
    counts = torch.bincount(labels, minlength=classes)
    if (counts == 0).any():
        raise UnimetricError(f"each class needs at least 1 image, but class {int(counts.argmin())} has none", "remove empty classes")
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    return sums.index_add_(0, labels, features.double()) / counts[:, None]
