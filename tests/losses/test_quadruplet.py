import math
from copy import deepcopy

import torch

from unimetric.geometry import Triplets, compare, draw, unit
from unimetric.losses.quadruplet import Quadruplet

# pytorch-metric-learning has no quadruplet loss.


def test_equals_the_loop(case):
    loss = Quadruplet(margin=0.5, second_margin=0.3)
    u = unit(case.references.detach())

    def distance(x, j):
        return math.sqrt((x - u[j]).square().sum().item() + 1e-8)

    similarity, pairs = compare(case.embeddings.detach(), case.labels, case.memory)
    mined = deepcopy(loss.miner)(similarity, pairs)
    neither = torch.zeros(10, len(u), dtype=torch.bool)
    for a in range(10):
        for j in case.negatives[a]:
            neither[a, j] = case.names[j] != case.names[mined.negative[a]]
    strangers, _ = draw(neither, deepcopy(loss.dice)(10))
    first, second = [], []
    for a in range(10):
        p, n, m = int(mined.positive[a]), int(mined.negative[a]), int(strangers[a])
        assert len({int(case.labels[a]), int(case.names[n]), int(case.names[m])}) == 3
        reach = distance(unit(case.embeddings[a]), p)
        first.append(max(0.0, reach - distance(unit(case.embeddings[a]), n) + 0.5))
        second.append(max(0.0, reach - distance(u[n], m) + 0.3))
    expected = (sum(first) + sum(second)) / 10
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), expected, rel_tol=1e-9)


def test_gradient(case):
    loss = Quadruplet(miner="hardest")
    assert torch.autograd.gradcheck(lambda z: deepcopy(loss)(z, case.labels, case.memory), case.embeddings)


def test_two_classes_leave_the_triplet_term():
    embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    loss = Quadruplet(miner=Fixed())
    expected = max(0.0, math.sqrt(0.4) - math.sqrt(0.8) + 0.2) / 2 + max(0.0, math.sqrt(0.4) - math.sqrt(0.4 * 0.2) + 0.2) / 2
    assert math.isclose(loss(embeddings, torch.tensor([0, 0, 1, 1])).item(), expected, rel_tol=1e-6)


class Fixed(torch.nn.Module):
    gives = Triplets

    def forward(self, similarity, pairs):
        triplets = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 3, 0]])
        return Triplets(*triplets.T, torch.tensor([True, True, False]))
