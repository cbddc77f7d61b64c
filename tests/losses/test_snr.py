import math
from copy import deepcopy

import pytest
import torch
from pytorch_metric_learning.distances import SNRDistance
from pytorch_metric_learning.losses import TripletMarginLoss

from unimetric.geometry import compare, unit
from unimetric.losses.snr import SNR


def hinges(case, triplets, margin):
    f, u = unit(case.embeddings.detach()), unit(case.references.detach())

    def snr(a, j):
        return float((f[a] - u[j]).var() / f[a].var())

    return [max(0.0, snr(a, p) - snr(a, n) + margin) for a, p, n in triplets]


def expected(case, triplets, margin, nu):
    active = [x for x in hinges(case, triplets, margin) if x > 0]
    return sum(active) / len(active) + nu * unit(case.embeddings.detach()).sum(-1).abs().mean().item()


def test_mined_triplets_equal_the_loop(case):
    loss = SNR(margin=0.3, nu=0.01)
    mined = deepcopy(loss.miner)(*compare(case.embeddings.detach(), case.labels, case.memory))
    triplets = list(zip(mined.anchor.tolist(), mined.positive.tolist(), mined.negative.tolist(), strict=True))
    value = loss(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, expected(case, triplets, 0.3, 0.01), rel_tol=1e-9)


def test_all_triplets_equal_the_loop(case):
    triplets = [(a, p, n) for a in range(10) for p in case.positives[a] for n in case.negatives[a]]
    value = SNR(miner="all")(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, expected(case, triplets, 0.2, 0.005), rel_tol=1e-9)


@pytest.mark.parametrize("miner", ["distance_weighted", "all"])
def test_gradient(case, miner):
    loss = SNR(miner=miner)
    assert torch.autograd.gradcheck(lambda z: deepcopy(loss)(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning_without_the_penalty():
    """Its own SNR loss is contrastive; the triplet loss over its SNR distance is the paper's, without the penalty."""
    torch.manual_seed(0)
    embeddings, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(4).repeat(3)
    peer = TripletMarginLoss(margin=0.2, distance=SNRDistance())
    torch.testing.assert_close(SNR(nu=0.0, miner="all")(embeddings, labels), peer(embeddings, labels), rtol=1e-9, atol=0)


def test_a_constant_embedding_has_no_signal_but_a_finite_loss():
    embeddings = torch.ones(4, 6).requires_grad_()
    loss = SNR()(embeddings, torch.tensor([0, 0, 1, 1]))
    loss.backward()
    assert loss.isfinite()
    assert embeddings.grad.isfinite().all()
