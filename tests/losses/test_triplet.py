import math
from copy import deepcopy

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner

from unimetric.geometry import compare, unit
from unimetric.losses.triplet import Triplet


def expected(case, triplets, *, margin, squared, active_only):
    def distance(a, j):
        square = (unit(case.embeddings[a]) - unit(case.references[j])).square().sum().item()
        return square if squared else math.sqrt(square + 1e-8)

    hinges = [max(0.0, distance(a, p) - distance(a, n) + margin) for a, p, n in triplets]
    return sum(hinges) / (sum(x > 0 for x in hinges) if active_only else len(hinges))


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("active_only", [True, False])
@pytest.mark.parametrize("miner", ["all", "random"])
def test_equals_the_loop(case, squared, active_only, miner):
    loss = Triplet(squared=squared, active_only=active_only, miner=miner)
    if miner == "all":
        triplets = [(a, p, n) for a in range(10) for p in case.positives[a] for n in case.negatives[a]]
    else:
        mined = deepcopy(loss.miner)(*compare(case.embeddings.detach(), case.labels, case.memory))
        listed = zip(mined.anchor.tolist(), mined.positive.tolist(), mined.negative.tolist(), mined.valid.tolist(), strict=True)
        triplets = [(a, p, n) for a, p, n, valid in listed if valid]
        assert len(triplets) == len(case.anchors)
    value = loss(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, expected(case, triplets, margin=0.2, squared=squared, active_only=active_only), rel_tol=1e-9)


@pytest.mark.parametrize("arguments", [{}, {"squared": False}, {"miner": "all"}, {"miner": "all", "squared": False, "active_only": True}])
def test_gradient(case, arguments):
    loss = Triplet(**arguments)
    assert torch.autograd.gradcheck(lambda z: deepcopy(loss)(z, case.labels, case.memory), case.embeddings)


@pytest.mark.parametrize("squared", [True, False])
def test_equals_pytorch_metric_learning_over_active_triplets(case, squared):
    """It averages over violated triplets and does not square; with LpDistance(power=2) it does. No epsilon under its root."""
    if case.memory is None:
        peer = TripletMarginLoss(margin=0.2, distance=LpDistance(power=2 if squared else 1))
        ours = Triplet(squared=squared, active_only=True, miner="all")
        torch.testing.assert_close(ours(case.embeddings, case.labels), peer(case.embeddings, case.labels), rtol=1e-6, atol=0)


def test_of_puma_is_pytorch_metric_learning_on_cosines_with_its_hardest_triplets(case):
    if case.memory is None:
        hardest = BatchHardMiner(distance=CosineSimilarity())(case.embeddings, case.labels)
        peer = TripletMarginLoss(margin=0.05, distance=CosineSimilarity())(case.embeddings, case.labels, hardest)
        ours = Triplet(margin=0.1, active_only=True, miner="hardest")(case.embeddings, case.labels)
        torch.testing.assert_close(ours, 2 * peer, rtol=1e-9, atol=0)
