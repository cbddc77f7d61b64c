import math

import torch
from pytorch_metric_learning.losses import NTXentLoss

from unimetric.geometry import unit
from unimetric.losses.nt_xent import NTXent


def test_equals_the_loop(case):
    def weight(a, j):
        return math.exp((unit(case.embeddings[a]) @ unit(case.references[j])).item() / 0.2)

    terms = []
    for a in case.anchors:
        rivals = sum(weight(a, n) for n in case.negatives[a])
        terms += [-math.log(weight(a, p) / (weight(a, p) + rivals)) for p in case.positives[a]]
    value = NTXent(temperature=0.2)(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, sum(terms) / len(terms), rel_tol=1e-9)


def test_gradient(case):
    assert torch.autograd.gradcheck(lambda z: NTXent()(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning(case):
    if case.memory is None:
        peer = NTXentLoss(temperature=0.07)(case.embeddings, case.labels)
        torch.testing.assert_close(NTXent(temperature=0.07)(case.embeddings, case.labels), peer, rtol=1e-9, atol=0)


def test_a_miner_drops_pairs(case):
    ours = NTXent(miner="multi_similarity(epsilon=0.0)")(case.embeddings, case.labels, case.memory)
    assert ours != NTXent()(case.embeddings, case.labels, case.memory)
