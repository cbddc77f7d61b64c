"""The parts of geometry that proxies and the ball rest on; losses test the rest."""

import math

import pytest
import torch

from unimetric.geometry import class_cosines, cosines, length, poincare, to_ball, unit


def points(count, seed=0):
    torch.manual_seed(seed)
    return torch.randn(count, 3, dtype=torch.float64, requires_grad=True)


def test_cosines_are_products_of_unit_vectors():
    a, b = points(4), points(5, seed=1)
    assert torch.allclose(cosines(a, b), unit(a) @ unit(b).T, rtol=1e-12)
    assert torch.allclose(cosines(a), unit(a) @ unit(a).T, rtol=1e-12)


def test_cosines_and_lengths_have_both_derivatives():
    a, b = points(4), points(5, seed=1)
    for function, inputs in ((cosines, (a, b)), (cosines, (a,)), (lambda b: cosines(a.detach(), b), (b,)), (length, (a,))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_cosines_of_zero_vectors_are_zero_with_zero_gradient(kind):
    a, directions = torch.zeros(3, 4, dtype=kind, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    found = class_cosines(a, directions)
    (found.sum() + cosines(a).sum()).backward()
    assert not found.any()
    assert not a.grad.any()  # NaN and infinity count as any
    assert not directions.grad.any()


def test_class_cosines_are_as_precise_as_the_directions():
    directions = torch.randn(5, 3)
    assert class_cosines(points(4).detach().bfloat16(), directions).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert class_cosines(points(4).detach().float(), directions).dtype == torch.float32


def test_the_ball_is_reached_from_the_tangent_space_at_the_origin():
    """The distance from the origin is twice the length of the tangent vector; its direction stays."""
    x = points(6).detach()
    z = to_ball(x, curvature=0.3)
    away = poincare(torch.zeros(1, 3, dtype=torch.float64), z, curvature=0.3)[0]
    assert torch.allclose(away, 2 * x.norm(dim=1), rtol=1e-4)  # the authors' 1e-5 in the denominator
    assert torch.allclose(unit(z), unit(x), rtol=1e-12)
    assert torch.allclose(
        to_ball(x, curvature=0.3, clip=0.5).norm(dim=1), torch.tensor(math.tanh(math.sqrt(0.3) * 0.5) / math.sqrt(0.3)).double(), rtol=1e-4
    )


@pytest.mark.parametrize("curvature", [0.1, 1.0])
def test_poincare_is_a_metric_with_a_finite_gradient_at_zero(curvature):
    z = to_ball(points(6), curvature=curvature, clip=2.3)
    distance = poincare(z, z, curvature=curvature)
    assert torch.allclose(distance, distance.T, rtol=1e-12)
    assert (distance[:, None, :] <= distance[:, :, None] + distance[None, :, :] + 1e-3).all()
    assert distance.diagonal().max() < 1e-4
    x = points(2)
    (gradient,) = torch.autograd.grad(poincare(x, x, curvature=0.01).sum(), x)
    assert gradient.isfinite().all()
