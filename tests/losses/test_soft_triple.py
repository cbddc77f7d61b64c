import math

import pytest
import torch
from pytorch_metric_learning import losses as peer
from tests.losses.conftest import example

from unimetric.losses.soft_triple import SoftTriple


def naive(z, y, centers, scale, margin, gamma, tau):
    total = 0.0
    for x, label in zip(z, y.tolist(), strict=True):
        logits = []
        for c, group in enumerate(centers):
            cosine = [float(x @ w / x.norm() / w.norm()) for w in group]
            weight = [math.exp(s / gamma) for s in cosine]
            logits.append(scale * (sum(w * s for w, s in zip(weight, cosine, strict=True)) / sum(weight) - margin * (c == label)))
        total += math.log(sum(math.exp(v - logits[label]) for v in logits))
    apart, count = 0.0, len(centers[0])
    for group in centers:
        for k in range(count):
            for other in range(k + 1, count):
                apart += math.sqrt(2 + 1e-5 - 2 * float(group[k] @ group[other] / group[k].norm() / group[other].norm()))
    return total / len(y) + (tau * apart / (len(centers) * count * (count - 1)) if count > 1 else 0)


@pytest.mark.parametrize("centers", [1, 2, 4])
@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_is_its_equation(centers, tau):
    z, y = example()
    loss = SoftTriple(centers_per_class=centers, tau=tau, num_classes=6, dim=5).double()
    assert math.isclose(loss(z, y).item(), naive(z, y, loss.proxies.detach(), 8, 0.01, 0.1, tau), rel_tol=1e-9)


def test_equals_the_peer():
    z, y = example()
    loss = SoftTriple(scale=20, centers_per_class=10, tau=0.0, num_classes=6, dim=5).double()
    theirs = peer.SoftTripleLoss(num_classes=6, embedding_size=5).double()
    theirs.fc.data = loss.proxies.data.flatten(0, 1).T.contiguous()
    assert math.isclose(loss(z, y).item(), theirs(z, y).item(), rel_tol=1e-9)


def test_gradients():
    z, y = example()
    loss = SoftTriple(centers_per_class=3, num_classes=6, dim=5).double()
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))


def test_merged_centres_have_a_finite_gradient():
    loss = SoftTriple(num_classes=3, dim=4)
    loss.proxies.data[:, 1] = loss.proxies.data[:, 0]
    loss(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
    assert loss.proxies.grad.isfinite().all()
