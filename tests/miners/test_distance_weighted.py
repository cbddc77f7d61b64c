import math

import pytest
import torch
from scipy.stats import chisquare

from unimetric.geometry import Pairs, compare, unit
from unimetric.miners.distance_weighted import DistanceWeighted


def drawn_distances(miner, *, anchors=400, references=2500, dim=4, throws=30):
    """On points spread evenly over the sphere, every reference a negative."""
    generator = torch.Generator().manual_seed(0)
    x = unit(torch.randn(anchors, dim, generator=generator))
    similarity = x @ unit(torch.randn(references, dim, generator=generator)).T
    everyone = torch.ones_like(similarity, dtype=torch.bool)
    pairs = Pairs(~everyone, everyone, torch.zeros(anchors, dtype=torch.int64), dim)
    distance = (2 - 2 * similarity).sqrt()
    return torch.cat([distance[torch.arange(anchors), miner(similarity, pairs).negative] for _ in range(throws)])


@pytest.mark.parametrize("dim", [4, 7])
def test_distances_are_flat_between_the_cutoffs(dim):
    distance = drawn_distances(DistanceWeighted(cutoff=0.7, upper_cutoff=1.7), dim=dim)
    assert distance.max() < 1.7
    counts = torch.histc(distance, bins=20, min=0.7, max=1.7)
    assert chisquare(counts.numpy()).pvalue > 1e-3
    assert counts.sum() > 9_000  # and not for lack of draws


def test_random_draws_would_not_be_flat():
    """The same points without weights: the test above can fail."""
    distance = drawn_distances(DistanceWeighted(cutoff=1.999), dim=4)  # beyond all distances: every weight is the same
    counts = torch.histc(distance, bins=20, min=0.7, max=1.7)
    assert chisquare(counts.numpy()).pvalue < 1e-9


def test_weights_equal_the_equation():
    torch.manual_seed(0)
    dim, labels = 5, torch.tensor([0, 0, 1, 1, 2, 2])
    similarity, pairs = compare(torch.randn(6, dim), labels)
    counts, throws = torch.zeros(6, 6), 4000
    many = Pairs(pairs.positive.repeat(throws, 1), pairs.negative.repeat(throws, 1), pairs.own.repeat(throws), dim)
    mined = DistanceWeighted()(similarity.repeat(throws, 1), many)
    counts.index_put_((mined.anchor % 6, mined.negative), torch.ones(6 * throws), accumulate=True)
    for a in range(6):
        distance = [max(0.5, math.sqrt(max(0, 2 - 2 * similarity[a, n]))) for n in range(6)]
        weight = [
            0 if labels[a] == labels[n] else distance[n] ** (2 - dim) * (1 - distance[n] ** 2 / 4) ** ((3 - dim) / 2) for n in range(6)
        ]
        for n in range(6):
            wanted = throws * weight[n] / sum(weight)
            assert abs(counts[a, n] - wanted) <= 4.5 * math.sqrt(wanted)


def test_upper_cutoff_falls_back_to_any_negative():
    labels = torch.tensor([0, 0, 1, 1])
    similarity, pairs = compare(torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [-1.0, 0.1]]), labels)
    miner = DistanceWeighted(upper_cutoff=1.4)
    assert {int(miner(similarity, pairs).negative[0]) for _ in range(50)} == {2, 3}


def test_alone_in_its_class_is_its_own_positive():
    similarity, pairs = compare(torch.randn(4, 64), torch.tensor([0, 1, 1, 1]))
    mined = DistanceWeighted()(similarity, pairs)
    assert mined.positive[0] == 0
    assert mined.valid.all()


def test_many_dimensions_neither_overflow_nor_lose_every_weight():
    torch.manual_seed(0)
    labels = torch.arange(8).repeat(2)
    similarity, pairs = compare(torch.randn(16, 2048), labels)
    assert pairs.negative[torch.arange(16), DistanceWeighted()(similarity, pairs).negative].all()
