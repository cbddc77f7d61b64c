import torch

from unimetric.geometry import Pairs, match
from unimetric.miners.random import Random


def test_draws_evenly_among_positives_and_negatives():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    pairs, throws = match(labels, dim=8), 3000
    many = Pairs(pairs.positive.repeat(throws, 1), pairs.negative.repeat(throws, 1), pairs.own.repeat(throws), 8)
    mined = Random()(torch.zeros(7 * throws, 7), many)
    positives, negatives = torch.zeros(7, 7), torch.zeros(7, 7)
    positives.index_put_((mined.anchor % 7, mined.positive), mined.valid.float(), accumulate=True)
    negatives.index_put_((mined.anchor % 7, mined.negative), mined.valid.float(), accumulate=True)
    for counts, mask in ((positives, pairs.positive), (negatives, pairs.negative)):
        wanted = throws * mask / mask.sum(-1, keepdim=True)
        wanted[6] = 0  # alone in its class: no triplet
        assert not counts[~mask].any()
        assert ((counts - wanted).abs() <= 4.5 * wanted.sqrt()).all()


def test_positive_and_negative_are_drawn_apart():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    pairs, miner = match(labels, dim=8), Random()
    seen = {tuple(x[0].item() for x in (m.positive, m.negative)) for m in (miner(torch.zeros(6, 6), pairs) for _ in range(100))}
    assert seen == {(p, n) for p in (1, 2) for n in (3, 4, 5)}
