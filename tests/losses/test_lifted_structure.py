import math

import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import LiftedStructureLoss

from unimetric.losses.lifted_structure import LiftedStructure


def test_equals_the_loop(case):
    def distance(x, y):
        return math.sqrt(sum((i - j) ** 2 for i, j in zip(x.tolist(), y.tolist(), strict=True)) + 1e-8)

    terms = []
    for a in case.anchors:
        for p in case.positives[a]:
            push = sum(math.exp(1 - distance(case.embeddings[a], case.references[n])) for n in case.negatives[a])
            push += sum(math.exp(1 - distance(case.references[p], case.references[n])) for n in case.negatives[a])
            terms.append(max(0, math.log(push) + distance(case.embeddings[a], case.references[p])) ** 2 / 2)
    value = LiftedStructure()(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, sum(terms) / len(terms), rel_tol=1e-9)


def test_gradient(case):
    assert torch.autograd.gradcheck(lambda z: LiftedStructure()(z, case.labels, case.memory), case.embeddings)


@pytest.mark.filterwarnings("ignore")
def test_equals_pytorch_metric_learning(case):
    """Its distances are normalised by default, and lack our epsilon under the root."""
    if case.memory is None:
        peer = LiftedStructureLoss(neg_margin=1, pos_margin=0, distance=LpDistance(normalize_embeddings=False))
        torch.testing.assert_close(LiftedStructure()(case.embeddings, case.labels), peer(case.embeddings, case.labels), rtol=1e-6, atol=0)
