"""How far two sets of features lie apart: the Frechet distance, exactly."""

from __future__ import annotations

import scipy.linalg
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.frechet import centre, eigenvalue_roots, root_sum


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
    (mean, own), (other_mean, other) = centre(points), centre(others)
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
