import math
from copy import deepcopy

import torch
from pytorch_metric_learning.losses import AngularLoss

from unimetric.geometry import draw, match, unit
from unimetric.losses.angular import Angular


def test_equals_the_loop(case):
    loss = Angular(alpha=40.0, weight=1.5, nu=0.01)
    drawn, _ = draw(match(case.labels, case.memory, dim=6).positive, deepcopy(loss.dice)(10))
    g, r = case.embeddings.detach() * 4, case.references.detach() * 4  # large enough for the clamp to matter
    memory = None if case.memory is None else deepcopy(case.memory)
    if memory is not None:
        memory.embeddings.mul_(4)
    f, u = unit(g), unit(r)
    square, terms, clamped = math.tan(math.radians(40)) ** 2, [], 0
    for a in case.anchors:
        p = int(drawn[a])
        raw = [float(g[a] @ r[n] - g[a] @ r[p]) for n in case.negatives[a]]
        clamped += sum(abs(x) > 50 for x in raw)
        angles = [float(4 * square * (f[a] + u[p]) @ u[n] - 2 * (1 + square) * f[a] @ u[p]) for n in case.negatives[a]]
        terms.append(math.log1p(sum(math.exp(min(50, max(-50, x))) for x in raw)) + 1.5 * math.log1p(sum(map(math.exp, angles))))
    assert clamped
    expected = sum(terms) / len(terms) + 0.01 * g.norm(dim=1).mean().item()
    assert math.isclose(loss(g, case.labels, memory).item(), expected, rel_tol=1e-9)


def test_gradient(case):
    loss = Angular()
    assert torch.autograd.gradcheck(lambda z: deepcopy(loss)(z, case.labels, case.memory), case.embeddings)


def test_angular_part_equals_pytorch_metric_learning():
    """It has neither the N-pair part nor the norm, and leaves the negatives as they come: hence unit vectors, and a difference of two."""
    torch.manual_seed(0)
    embeddings, labels = unit(torch.randn(12, 6, dtype=torch.float64)), torch.arange(6).repeat(2)
    ours = Angular(alpha=40.0, weight=2.0)(embeddings, labels) - Angular(alpha=40.0, weight=1.0)(embeddings, labels)
    torch.testing.assert_close(ours, AngularLoss(alpha=40)(embeddings, labels), rtol=1e-9, atol=0)
