import math

import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import GeneralizedLiftedStructureLoss

from unimetric.losses.generalized_lifted import GeneralizedLifted


def test_equals_the_loop(case):
    def distance(a, j):
        return math.sqrt((case.embeddings[a] - case.references[j]).square().sum().item() + 1e-8)

    hinges = []
    for a in case.anchors:
        pull = math.log(sum(math.exp(distance(a, p)) for p in case.positives[a]))
        push = math.log(sum(math.exp(2.5 - distance(a, n)) for n in case.negatives[a]))
        hinges.append(max(0.0, pull + push))
    norm = case.embeddings.detach().norm(dim=1).mean().item()
    expected = sum(hinges) / len(hinges) + 0.01 * norm
    assert math.isclose(GeneralizedLifted(margin=2.5, nu=0.01)(case.embeddings, case.labels, case.memory).item(), expected, rel_tol=1e-9)


def test_gradient(case):
    loss = GeneralizedLifted()
    assert torch.autograd.gradcheck(lambda z: loss(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning_without_the_norm():
    """It normalises by default, and counts anchors alone in their class; ours does neither."""
    torch.manual_seed(0)
    embeddings, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(4).repeat(3)
    peer = GeneralizedLiftedStructureLoss(neg_margin=1, distance=LpDistance(normalize_embeddings=False))
    torch.testing.assert_close(GeneralizedLifted(nu=0.0)(embeddings, labels), peer(embeddings, labels), rtol=1e-7, atol=0)


def test_solved_batch_costs_only_its_norm():
    labels = torch.tensor([0, 0, 1, 1])
    embeddings = 100.0 * torch.eye(2, dtype=torch.float64)[labels]
    assert math.isclose(GeneralizedLifted()(embeddings, labels).item(), 0.005 * 100, rel_tol=1e-9)
