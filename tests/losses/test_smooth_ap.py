import math

import pytest
import torch
from pytorch_metric_learning.losses import SmoothAPLoss

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, unit
from unimetric.losses import smooth_ap
from unimetric.losses.smooth_ap import SmoothAP


def naive(case, temperature):
    def step(x):
        return 1 / (1 + math.exp(-x / temperature))

    lost = []
    for a in case.anchors:
        s = [(unit(case.embeddings[a]) @ unit(r)).item() for r in case.references]
        precisions = []
        for p in case.positives[a]:
            near = 1 + sum(step(s[q] - s[p]) for q in case.positives[a] if q != p)
            precisions.append(near / (near + sum(step(s[n] - s[p]) for n in case.negatives[a])))
        lost.append(1 - sum(precisions) / len(precisions))
    return sum(lost) / len(lost)


@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_equals_the_loop(case, temperature):
    value = SmoothAP(temperature=temperature)(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, naive(case, temperature), rel_tol=1e-9)


def test_gradient(case):
    assert torch.autograd.gradcheck(lambda z: SmoothAP(temperature=0.1)(z, case.labels, case.memory), case.embeddings)


def test_captured_it_agrees(case):
    """The compiler sees one operator, whose shapes it is told."""
    loss = SmoothAP(temperature=0.1)
    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager, traced = loss(case.embeddings, case.labels, case.memory), captured(case.embeddings, case.labels, case.memory)
    torch.testing.assert_close(traced, eager, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, case.embeddings)[0] for value in (eager, traced)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limit", ["BLOCK", "CACHED"], ids=["one column at a time", "one row at a time"])
def test_blocks_change_nothing(case, limit, monkeypatch):
    whole = SmoothAP(temperature=0.1)(case.embeddings, case.labels, case.memory)
    monkeypatch.setattr(smooth_ap, limit, 1)
    blocks = SmoothAP(temperature=0.1)(case.embeddings, case.labels, case.memory)
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, case.embeddings)[0] for value in (whole, blocks)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_equals_pytorch_metric_learning_where_anchors_retrieve_themselves():
    """It, like the authors' code, lets an anchor retrieve itself: here by a ring in which no anchor knows its own column.

    Of three samples a class, as its reshape needs as many classes as samples a class.
    """
    torch.manual_seed(0)
    embeddings, labels = torch.randn(9, 6, dtype=torch.float64), torch.arange(3).repeat_interleave(3)
    everyone = Memory(embeddings, labels, torch.ones(9, dtype=torch.bool), torch.full((9,), -1))
    peer = SmoothAPLoss(temperature=0.1)(embeddings, labels)
    torch.testing.assert_close(SmoothAP(temperature=0.1)(embeddings, labels, everyone), peer.double(), rtol=1e-6, atol=0)


def test_perfect_ranking_costs_nothing():
    labels = torch.tensor([0, 0, 1, 1, 2])
    assert SmoothAP()(torch.eye(3, dtype=torch.float64)[labels], labels).item() == pytest.approx(0, abs=1e-12)


def test_gradient_of_the_gradient_is_an_error(case):
    """It would lack the second derivative of the sigmoids, as if the gradient were constant."""
    value = SmoothAP(temperature=0.1)(case.embeddings, case.labels, case.memory)
    with pytest.raises(UnimetricError, match="`smooth_ap` has no gradient of its gradient"):
        torch.autograd.grad(value, case.embeddings, create_graph=True)
