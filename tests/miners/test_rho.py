from copy import deepcopy

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, Pairs, compare
from unimetric.miners.rho import Rho


def batch():
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    return compare(torch.randn(10, 6), labels)


def test_never_is_the_wrapped_miner_less_the_anchors_alone():
    similarity, pairs = batch()
    rho = Rho(p_switch=0.0, miner="semihard(margin=0.3)")
    wrapped, mined = deepcopy(rho.miner)(similarity, pairs), rho(similarity, pairs)
    for name in ("anchor", "positive", "negative"):
        assert torch.equal(getattr(mined, name), getattr(wrapped, name))
    assert mined.valid.tolist() == [True] * 9 + [False]


def test_always_puts_the_anchor_for_the_positive_and_a_sibling_for_the_negative():
    similarity, pairs = batch()
    rho, siblings = Rho(p_switch=1.0), set()
    for _ in range(40):
        mined = rho(similarity, pairs)
        assert torch.equal(mined.positive, mined.anchor)
        assert pairs.positive[mined.anchor, mined.negative][:9].all()
        assert mined.valid.tolist() == [True] * 9 + [False]
        siblings.add(int(mined.negative[0]))
    assert siblings == {1, 2}


def test_switches_as_often_as_it_says():
    similarity, pairs = batch()
    throws = 2000
    many = Pairs(pairs.positive.repeat(throws, 1), pairs.negative.repeat(throws, 1), pairs.own.repeat(throws), 6)
    mined = Rho(p_switch=0.3)(similarity.repeat(throws, 1), many)
    switch = (mined.positive == many.own)[mined.valid]
    assert torch.equal(switch, many.positive[mined.anchor, mined.negative][mined.valid])  # both ends or neither
    often = switch.view(throws, 9).float().mean(0)  # of each anchor but the one alone
    assert (often - 0.3).abs().max() < 4.5 * (0.3 * 0.7 / throws) ** 0.5


def test_what_is_switched_says_nothing_of_the_positives_that_stay():
    """Rho and its miner once threw the same numbers outside a run: what stayed had the second of two siblings five times in six."""
    similarity, pairs = batch()
    throws = 2000
    many = Pairs(pairs.positive.repeat(throws, 1), pairs.negative.repeat(throws, 1), pairs.own.repeat(throws), 6)
    for miner in ("distance_weighted", "random", "semihard", "softhard"):
        mined = Rho(p_switch=0.4, miner=miner)(similarity.repeat(throws, 1), many)
        stays = mined.valid & (mined.positive != many.own)
        first = (mined.positive == many.positive.to(torch.uint8).argmax(1))[stays].float().mean()
        alone = Rho(p_switch=0.0, miner=miner)(similarity.repeat(throws, 1), many)
        wanted = (alone.positive == many.positive.to(torch.uint8).argmax(1))[alone.valid].float().mean()
        assert abs(first - wanted) < 0.02, miner


def test_against_a_ring_the_anchor_is_its_own_column():
    torch.manual_seed(0)
    embeddings, labels = torch.randn(4, 6), torch.tensor([0, 0, 1, 1])
    ring = Memory(
        torch.cat([torch.randn(3, 6), embeddings]), torch.cat([torch.tensor([0, 1, 2]), labels]), torch.ones(7) > 0, torch.arange(3, 7)
    )
    mined = Rho(p_switch=1.0)(*compare(embeddings, labels, ring))
    assert mined.positive.tolist() == [3, 4, 5, 6]
    assert (ring.labels[mined.negative] == labels).all()
    assert (mined.negative != mined.positive).all()


def test_a_miner_of_pairs_is_refused():
    with pytest.raises(UnimetricError, match="MultiSimilarity gives Pairs") as error:
        Rho(miner="multi_similarity")
    assert "distance_weighted" in error.value.hint
