import math

import pytest
import torch
from pytorch_metric_learning import losses as peer
from tests.losses.conftest import example

from unimetric.losses.proxy_nca_pp import ProxyNCAPP


def naive(z, y, proxies, temperature):
    total = 0.0
    for x, label in zip(z, y.tolist(), strict=True):
        square = [float((x / x.norm() - p / p.norm()).square().sum()) for p in proxies]
        total -= math.log(math.exp(-square[label] / temperature) / sum(math.exp(-d / temperature) for d in square))
    return total / len(y)


@pytest.mark.parametrize("temperature", [1 / 9, 1.0])
def test_is_its_equation(temperature):
    z, y = example()
    loss = ProxyNCAPP(temperature=temperature, num_classes=6, dim=5).double()
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), temperature), rel_tol=1e-9)


def test_equals_the_peer():
    z, y = example()
    loss = ProxyNCAPP(num_classes=6, dim=5).double()
    theirs = peer.ProxyNCALoss(num_classes=6, embedding_size=5, softmax_scale=9).double()
    theirs.proxies.data = loss.proxies.data
    assert math.isclose(loss(z, y).item(), theirs(z, y).item(), rel_tol=1e-9)


def test_gradients():
    z, y = example()
    loss = ProxyNCAPP(num_classes=6, dim=5).double()
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))
