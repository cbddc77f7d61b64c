import math

import torch
from pytorch_metric_learning import losses as peer
from tests.losses.conftest import example

from unimetric.losses.proxy_anchor import ProxyAnchor


def naive(z, y, proxies, alpha, margin):
    labels = y.tolist()
    pull = push = 0.0
    for c, p in enumerate(proxies):
        cosine = [float(x @ p / x.norm() / p.norm()) for x in z]
        if c in labels:
            pull += math.log(1 + sum(math.exp(-alpha * (s - margin)) for s, label in zip(cosine, labels, strict=True) if label == c))
        push += math.log(1 + sum(math.exp(alpha * (s + margin)) for s, label in zip(cosine, labels, strict=True) if label != c))
    return pull / len(set(labels)) + push / len(proxies)


def test_is_its_equation():
    z, y = example()
    loss = ProxyAnchor(num_classes=6, dim=5).double()
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), 32, 0.1), rel_tol=1e-9)


def test_a_class_that_fills_the_batch_pushes_nothing_onto_its_own_proxy():
    z, y = example()
    loss = ProxyAnchor(alpha=4, num_classes=6, dim=5).double()
    y = torch.zeros_like(y)
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), 4, 0.1), rel_tol=1e-9)


def test_equals_the_peer():
    z, y = example()
    loss = ProxyAnchor(num_classes=6, dim=5).double()
    theirs = peer.ProxyAnchorLoss(num_classes=6, embedding_size=5, margin=0.1, alpha=32).double()
    theirs.proxies.data = loss.proxies.data
    assert math.isclose(loss(z, y).item(), theirs(z, y).item(), rel_tol=1e-9)


def test_gradients():
    z, y = example()
    loss = ProxyAnchor(num_classes=6, dim=5).double()
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))
