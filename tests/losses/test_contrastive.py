import math
from copy import deepcopy

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from unimetric.geometry import compare, unit
from unimetric.losses.contrastive import Contrastive


def distance(case, a, j):
    difference = unit(case.embeddings[a]) - unit(case.references[j])
    return math.sqrt(difference.square().sum().item() + 1e-8)


def mean(values):
    return sum(values) / max(1, len(values))


def test_mined_triplets_equal_the_loop(case):
    loss = Contrastive(margin=1.3, positive_margin=1.4)
    mined = deepcopy(loss.miner)(*compare(case.embeddings.detach(), case.labels, case.memory))
    triplets = list(zip(mined.anchor.tolist(), mined.positive.tolist(), mined.negative.tolist(), strict=True))
    pull = mean([max(0, distance(case, a, p) - 1.4) for a, p, _ in triplets])
    push = mean([max(0, 1.3 - distance(case, a, n)) for a, _, n in triplets])
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), pull + push, rel_tol=1e-9)


@pytest.mark.parametrize("active_only", [False, True])
def test_all_pairs_equal_the_loop(case, active_only):
    loss = Contrastive(margin=1.3, positive_margin=1.4, active_only=active_only, miner="all")
    pull = [max(0, distance(case, a, p) - 1.4) for a in range(10) for p in case.positives[a]]
    push = [max(0, 1.3 - distance(case, a, n)) for a in range(10) for n in case.negatives[a]]
    assert min(pull) == min(push) == 0  # or the flag would show nothing
    if active_only:
        pull, push = [x for x in pull if x > 0], [x for x in push if x > 0]
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), mean(pull) + mean(push), rel_tol=1e-9)


def test_cosine_form_equals_the_loop(case):
    loss = Contrastive(cosine=True, margin=0.2, miner="all")
    total = 0.0
    for a in range(10):
        for j in case.positives[a] + case.negatives[a]:
            s = (unit(case.embeddings[a]) @ unit(case.references[j])).item()
            total += (1 - s if s < 1 - 1e-5 else 0) if j in case.positives[a] else (s if s > 0.2 else 0)
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), total / 10, rel_tol=1e-9)


@pytest.mark.parametrize("arguments", [{}, {"miner": "all"}, {"cosine": True, "margin": 0.2, "miner": "all"}])
def test_gradient(case, arguments):
    loss = Contrastive(**arguments)
    assert torch.autograd.gradcheck(lambda z: deepcopy(loss)(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning_over_active_pairs(case):
    """It divides by the pairs with a loss, and has no epsilon under its roots."""
    peer = ContrastiveLoss(pos_margin=1.4, neg_margin=1.3)
    if case.memory is None:
        ours = Contrastive(margin=1.3, positive_margin=1.4, active_only=True, miner="all")
        torch.testing.assert_close(ours(case.embeddings, case.labels), peer(case.embeddings, case.labels), rtol=1e-6, atol=0)


def test_rho_at_one_leaves_no_pull(case):
    loss = Contrastive(margin=2.0, miner="rho(p_switch=1)")
    push = loss(case.embeddings, case.labels, case.memory)
    loss.margin = 0.0  # and now no push either
    nothing = loss(case.embeddings, case.labels, case.memory)
    assert push > 0
    assert nothing == 0
    assert not torch.autograd.grad(nothing, case.embeddings)[0].any()
