import math

import pytest
import torch
from pytorch_metric_learning import losses as peer
from tests.losses.conftest import opposite_example

from unimetric.losses.arcface import ArcFace


def naive(z, y, proxies, margin, scale, fallback, clamp_positive):
    total = 0.0
    for x, label in zip(z, y.tolist(), strict=True):
        low = 1e-10 if clamp_positive else -1 + 1e-7
        logits = [min(max(float(x @ p / x.norm() / p.norm()), low), 1 - 1e-7) for p in proxies]
        angle = math.acos(logits[label])
        if fallback and angle >= math.pi - margin:
            logits[label] -= margin * math.sin(math.pi - margin)
        else:
            logits[label] = math.cos(angle + margin)
        total += math.log(sum(math.exp(scale * (v - logits[label])) for v in logits))
    return total / len(y)


def build(proxies, **arguments):
    loss = ArcFace(num_classes=6, dim=5, **arguments).double()
    loss.proxies.data = proxies.clone()
    return loss


@pytest.mark.parametrize("clamp_positive", [False, True])
@pytest.mark.parametrize("fallback", [False, True])
def test_is_its_equation(fallback, clamp_positive):
    z, y, proxies = opposite_example()
    loss = build(proxies, fallback=fallback, clamp_positive=clamp_positive)
    assert math.isclose(loss(z, y).item(), naive(z, y, proxies, 0.5, 16, fallback, clamp_positive), rel_tol=1e-9)


def test_the_margin_is_on_the_own_class_only():
    """On every logit it would cancel, as in the code behind the numbers of Roth et al."""
    z, y, proxies = opposite_example()
    assert build(proxies, margin=0.5)(z, y) > build(proxies, margin=0.0)(z, y) + 1


def test_equals_the_peer():
    z, y, proxies = opposite_example()
    theirs = peer.ArcFaceLoss(num_classes=6, embedding_size=5, margin=math.degrees(0.5), scale=64).double()
    theirs.W.data = proxies.T.contiguous()
    assert math.isclose(build(proxies, scale=64, fallback=True)(z, y).item(), theirs(z, y).item(), rel_tol=1e-9)


@pytest.mark.parametrize("fallback", [False, True])
def test_gradients(fallback):
    z, y, proxies = opposite_example()
    loss = build(proxies, fallback=fallback)
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))


def test_gradient_is_finite_on_the_class_direction_itself():
    loss = ArcFace(num_classes=3, dim=4)
    z = loss.proxies.detach().clone().requires_grad_()
    loss(z, torch.arange(3)).backward()
    assert z.grad.isfinite().all()
    assert loss.proxies.grad.isfinite().all()
