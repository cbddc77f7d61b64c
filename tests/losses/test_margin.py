import math
from copy import deepcopy

import pytest
import torch
from pytorch_metric_learning.losses import MarginLoss

from unimetric.geometry import Triplets, compare, unit
from unimetric.losses.margin import Margin


def distance(case, a, j):
    return math.sqrt((unit(case.embeddings[a]) - unit(case.references[j])).square().sum().item() + 1e-8)


def boundaries(loss):
    """Of the ten anchors; classes 0 to 4, each with a boundary of its own."""
    with torch.no_grad():
        loss.beta.copy_(torch.linspace(0.9, 1.3, 5))
    return loss.double(), [loss.beta[c].item() for c in (0, 1, 0, 1, 1, 2, 3, 2, 3, 4)]


def small(case):
    return case.labels - 2**25, None if case.memory is None else replace_labels(case.memory)


def replace_labels(memory):
    return type(memory)(memory.embeddings, memory.labels - 2**25, memory.valid, memory.own)


@pytest.mark.parametrize("or_count", [False, True])
def test_mined_triplets_equal_the_loop(case, or_count):
    loss, beta = boundaries(Margin(margin=0.15, nu=0.01, or_count=or_count, num_classes=5))
    labels, memory = small(case)
    mined = deepcopy(loss.miner)(*compare(case.embeddings.detach(), labels, memory))
    total, pairs, triplets = 0.0, 0, 0
    for a, p, n in zip(mined.anchor.tolist(), mined.positive.tolist(), mined.negative.tolist(), strict=True):
        pull, push = max(0, distance(case, a, p) - beta[a] + 0.15), max(0, beta[a] - distance(case, a, n) + 0.15)
        total, pairs, triplets = total + pull + push, pairs + (pull > 0) + (push > 0), triplets + (pull > 0 or push > 0)
    assert pairs != triplets
    expected = total / (triplets if or_count else pairs) + 0.01 * sum(beta)
    assert math.isclose(loss(case.embeddings, labels, memory).item(), expected, rel_tol=1e-9)


def test_all_pairs_equal_the_loop(case):
    loss, beta = boundaries(Margin(miner="all", num_classes=5))
    pull = [max(0, distance(case, a, p) - beta[a] + 0.2) for a in range(10) for p in case.positives[a]]
    push = [max(0, beta[a] - distance(case, a, n) + 0.2) for a in range(10) for n in case.negatives[a]]
    expected = (sum(pull) + sum(push)) / sum(x > 0 for x in pull + push)
    labels, memory = small(case)
    assert math.isclose(loss(case.embeddings, labels, memory).item(), expected, rel_tol=1e-9)


def test_gradient_of_embeddings_and_boundaries(case):
    loss, _ = boundaries(Margin(nu=0.01, num_classes=5))
    labels, memory = small(case)

    def value(z, beta):
        return torch.func.functional_call(deepcopy(loss), {"beta": beta}, (z, labels, memory))

    assert torch.autograd.gradcheck(value, (case.embeddings, loss.beta))


def test_equals_pytorch_metric_learning_on_the_same_triplets(case):
    """Over all pairs it weighs a pair by the triplets it is in; ours counts it once. On given triplets both are the same."""

    class Given(torch.nn.Module):
        gives = Triplets

        def forward(self, similarity, pairs):
            return Triplets(*triplets, torch.ones(len(triplets[0]), dtype=torch.bool))

    if case.memory is None:
        listed = [(a, p, n) for a in range(10) for p in case.positives[a] for n in case.negatives[a][::3]]
        triplets = tuple(torch.tensor(listed).T)
        ours = Margin(beta=1.1, miner=Given())(case.embeddings, case.labels)
        peer = MarginLoss(beta=1.1)(case.embeddings, case.labels, triplets)
        torch.testing.assert_close(ours, peer, rtol=1e-6, atol=0)


def test_rho_at_one_leaves_no_pull(case):
    loss = Margin(beta=1.5, miner="rho(p_switch=1)")
    mined = deepcopy(loss.miner)(*compare(case.embeddings.detach(), case.labels, case.memory))
    pushes = [max(0, 1.5 - distance(case, a, int(mined.negative[a])) + 0.2) for a in case.anchors]
    active = [push for push in pushes if push > 0]
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), sum(active) / len(active), rel_tol=1e-7)


def test_boundary_is_fixed_when_it_is_not_learnt():
    assert not Margin(learn_beta=False).beta.requires_grad
