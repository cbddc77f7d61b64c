import math

import torch

from unimetric.losses.generalized_lifted import GeneralizedLifted

# pytorch-metric-learning's LiftedStructureLoss is the form of Song et al., over positive pairs: not the same thing, so no comparison here.


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


def test_solved_batch_costs_only_its_norm():
    labels = torch.tensor([0, 0, 1, 1])
    embeddings = 100.0 * torch.eye(2, dtype=torch.float64)[labels]
    assert math.isclose(GeneralizedLifted()(embeddings, labels).item(), 0.005 * 100, rel_tol=1e-9)
