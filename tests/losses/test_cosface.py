import math

import torch
from pytorch_metric_learning import losses as peer
from tests.losses.conftest import example

from unimetric.losses.cosface import CosFace


def naive(z, y, proxies, margin, scale):
    total = 0.0
    for x, label in zip(z, y.tolist(), strict=True):
        logits = [scale * (float(x @ p / x.norm() / p.norm()) - margin * (c == label)) for c, p in enumerate(proxies)]
        total += math.log(sum(math.exp(v - logits[label]) for v in logits))
    return total / len(y)


def test_is_its_equation():
    z, y = example()
    loss = CosFace(num_classes=6, dim=5).double()
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), 0.35, 64), rel_tol=1e-9)


def test_equals_the_peer():
    z, y = example()
    loss = CosFace(num_classes=6, dim=5).double()
    theirs = peer.CosFaceLoss(num_classes=6, embedding_size=5).double()
    theirs.W.data = loss.proxies.data.T.contiguous()
    assert math.isclose(loss(z, y).item(), theirs(z, y).item(), rel_tol=1e-9)


def test_gradients():
    z, y = example()
    loss = CosFace(num_classes=6, dim=5).double()
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))
