import math

import pytest
import torch
from tests.losses.conftest import example

from unimetric.errors import UnimetricError
from unimetric.losses.proxy_nca import ProxyNCA


def naive(z, y, proxies, scale):
    z, proxies = z.double(), proxies.double()
    total = 0.0
    for x, label in zip(z, y.tolist(), strict=True):
        x = scale * x / x.norm()
        square = [float((x - scale * p / p.norm()).square().sum()) for p in proxies]
        total += square[label] + math.log(sum(math.exp(-d) for c, d in enumerate(square) if c != label))
    return total / len(y)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_is_its_equation(scale):
    z, y = example()
    loss = ProxyNCA(scale=scale, num_classes=6, dim=5).double()
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), scale), rel_tol=1e-9)


def test_gradients():
    torch.manual_seed(0)
    z, y = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 0, 1, 1, 2])
    loss = ProxyNCA(num_classes=3, dim=4).double()
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z, loss.proxies))


def test_one_class_is_refused():
    with pytest.raises(UnimetricError, match="`num_classes` must be at least 2, got 1"):
        ProxyNCA(num_classes=1, dim=4)
