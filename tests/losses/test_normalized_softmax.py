import math

import torch
from pytorch_metric_learning import losses as peer
from tests.losses.conftest import example

from unimetric.geometry import unit
from unimetric.losses.normalized_softmax import NormalizedSoftmax


def naive(z, y, proxies, temperature):
    total = 0.0
    for x, label in zip(z, y.tolist(), strict=True):
        cosine = [float(x @ p / x.norm() / p.norm()) for p in proxies]
        total -= math.log(math.exp(cosine[label] / temperature) / sum(math.exp(c / temperature) for c in cosine))
    return total / len(y)


def test_is_its_equation():
    z, y = example()
    loss = NormalizedSoftmax(num_classes=6, dim=5).double()
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), 0.05), rel_tol=1e-9)


def test_equals_the_peer():
    z, y = example()
    loss = NormalizedSoftmax(num_classes=6, dim=5).double()
    theirs = peer.NormalizedSoftmaxLoss(num_classes=6, embedding_size=5, temperature=0.05).double()
    theirs.W.data = loss.proxies.data.T.contiguous()
    assert math.isclose(loss(z, y).item(), theirs(unit(z), y).item(), rel_tol=1e-9)


def test_gradients():
    z, y = example()
    loss = NormalizedSoftmax(num_classes=6, dim=5).double()
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))
