import math
from copy import deepcopy

import pytest
import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.losses import NPairsLoss

from unimetric.geometry import Memory, draw, match
from unimetric.losses.n_pair import NPair


def term(case, a, p, scale=1.0):
    g, r = case.embeddings.detach() * scale, case.references.detach() * scale
    return math.log1p(sum(math.exp(g[a] @ r[n] - g[a] @ r[p]) for n in case.negatives[a]))


def norm(case):
    return case.embeddings.detach().norm(dim=1).mean().item()


def test_one_drawn_positive_equals_the_loop(case):
    loss = NPair(scale=0.25)
    pairs = match(case.labels, case.memory, dim=6)
    drawn, _ = draw(pairs.positive, deepcopy(loss.dice)(10))
    terms = [term(case, a, int(drawn[a]), 0.25) for a in case.anchors]
    expected = sum(terms) / len(terms) + 0.005 * 0.25 * norm(case)
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), expected, rel_tol=1e-9)


def test_all_positives_equal_the_loop(case):
    terms = [term(case, a, p) for a in case.anchors for p in case.positives[a]]
    expected = sum(terms) / len(terms) + 0.02 * norm(case)
    assert math.isclose(NPair(nu=0.02, all_positives=True)(case.embeddings, case.labels, case.memory).item(), expected, rel_tol=1e-9)


@pytest.mark.parametrize("all_positives", [False, True])
def test_gradient(case, all_positives):
    loss = NPair(all_positives=all_positives)
    assert torch.autograd.gradcheck(lambda z: deepcopy(loss)(z, case.labels, case.memory), case.embeddings)


def test_the_drawn_positive_changes_from_batch_to_batch(case):
    loss = NPair()
    assert len({loss(case.embeddings, case.labels, case.memory).item() for _ in range(8)}) > 1


def test_equals_pytorch_metric_learning_where_negatives_are_the_other_positives():
    """It takes one pair a class and only the other pairs' positives as negatives; ours takes every sample of another class.

    By default it normalises too; the N-pair loss does not.
    """
    torch.manual_seed(0)
    embeddings, labels = torch.randn(8, 6, dtype=torch.float64), torch.arange(4).repeat(2)
    first, second = torch.arange(4), torch.arange(4, 8)
    peer = NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))(embeddings, labels, (first, second, first[:0], first[:0]))
    positives = Memory(embeddings[second], labels[second], torch.ones(4, dtype=torch.bool), torch.full((4,), -1))
    torch.testing.assert_close(NPair(nu=0.0)(embeddings[first], labels[first], positives), peer, rtol=1e-9, atol=0)


def test_large_embeddings_stay_finite():
    embeddings = (1000 * torch.eye(4)).requires_grad_()
    loss = NPair()(embeddings, torch.tensor([0, 0, 1, 1]))
    loss.backward()
    assert loss.isfinite()
    assert embeddings.grad.isfinite().all()
