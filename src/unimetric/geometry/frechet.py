"""The Fréchet distance between Gaussians, for many of them at once and on any device.

    F = |mu - mu*|^2 + tr S + tr S* - 2 tr (S S*)^(1/2)

The root is not computed. If S = X^T X, the trace of (S S*)^(1/2) is the sum of the square roots of the eigenvalues of the positive
semi-definite X S* X^T. It is real, exact if S is singular, and at most as large as the number of points.

m Gaussians, P points each, D dimensions. Computed in float64 for any input type: the costs of random subsets differ in the third
digit, and neither autocast nor TF32 applies to float64.
"""

from __future__ import annotations

import scipy.linalg
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError


def gaussian(points: Float[Tensor, "*m P D"]) -> tuple[Float[Tensor, "*m D"], Float[Tensor, "*m D D"]]:
    """Mean and unbiased covariance."""
    mean, centred = center(points)
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
    mean, centred = center(points)
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


def center(points: Float[Tensor, "*m P D"]) -> tuple[Float[Tensor, "*m D"], Float[Tensor, "*m P D"]]:
    """Mean, and X with X^T X the covariance."""
    points = points.double()
    mean = points.mean(-2)
    return mean, (points - mean.unsqueeze(-2)) / (points.shape[-2] - 1) ** 0.5


def _assemble(mean: Tensor, trace: Tensor, other_mean: Tensor, other_covariance: Tensor, product: Tensor) -> Tensor:
    shift = (mean.double() - other_mean.double()).square().sum(-1)
    return shift + trace + other_covariance.double().trace() - 2 * trace_of_root((product + product.mT) / 2)


def frechet_distance(points: Float[Tensor, "*m P D"], others: Float[Tensor, "*m Q D"]) -> Float[Tensor, "*m"]:
    """The Frechet distance between the Gaussians of two sets of points (Heusel et al., NeurIPS 2017), as Milbich et al. 2021 use it.

        F = |mu - mu*|^2 + tr S + tr S* - 2 tr (S S*)^(1/2)

    With the centred points S = X^T X and S* = Y^T Y, and the last trace is the sum of the singular values of X Y^T. For few points that
    is a small matrix, whatever the dimension, and nothing is squared: classes by the hundred in 2,048 dimensions take milliseconds. For
    many points it is the symmetric eigenproblem of L^T S L, with L L^T = S*. No root of a matrix is formed, so that singular
    covariances need no 1e-8 on their diagonals and nothing imaginary has to be cut off, as in the authors' code.

    Args:
        points, others: the two sets, two points at least in each; sets of sets where there are leading dimensions. Any floating type;
            the work is done in float64.
    """
    for one in (points, others):
        if one.shape[-2] < 2:
            raise UnimetricError(f"a Gaussian of {one.shape[-2]} point(s) has no covariance", "give two points (or classes) at least")
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
    """tr (S S*)^(1/2) of centred points, by LAPACK's symmetric eigenproblem for products: S S* v = lambda v."""
    covariance, other_covariance = (points.numpy().T @ points.numpy() for points in (own, other))  # numpy makes half of it, and mirrors it
    try:
        values = scipy.linalg.eigh(covariance, other_covariance, type=2, eigvals_only=True, driver="gv", check_finite=False)
    except scipy.linalg.LinAlgError:  # the other covariance is singular
        across = own @ _factor(torch.from_numpy(other_covariance))
        return eigenvalue_roots(across.mT @ across)
    return root_sum(torch.from_numpy(values))


def _factor(covariance: Float[Tensor, "*m D D"]) -> Float[Tensor, "*m D D"]:
    """L with L L^T = S: Cholesky's, or where S is singular the eigenvectors by the roots of their eigenvalues."""
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return lower
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def class_means(features: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int) -> Float[Tensor, "K D"]:
    """The mean feature of each class, float64. Milbich et al. 2021 measure the shift between these, one point a class.

    Args:
        features: one row a picture, not normalised.
        labels: (N,) the class of each.
        classes: K.
    """
    counts = torch.bincount(labels, minlength=classes)
    if (counts == 0).any():
        raise UnimetricError(f"class {int(counts.argmin())} has no picture, so it has no mean", "leave empty classes out")
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    return sums.index_add_(0, labels, features.double()) / counts[:, None]
