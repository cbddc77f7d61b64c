import torch

from unimetric.geometry import compare
from unimetric.miners.semihard import Semihard


def test_picks_lie_in_the_band_and_reach_all_of_it():
    torch.manual_seed(0)
    labels = torch.arange(8).repeat(4)
    similarity, pairs = compare(torch.randn(32, 6), labels)
    distance = (2 - 2 * similarity).sqrt()
    miner, bands, picks, fallbacks = Semihard(margin=0.2), {}, {}, 0
    for _ in range(150):
        mined = miner(similarity, pairs)
        assert mined.valid.all()
        for a, (p, n) in enumerate(zip(mined.positive.tolist(), mined.negative.tolist(), strict=True)):
            assert pairs.positive[a, p]
            reach = distance[a, p]
            band = pairs.negative[a] & (distance[a] > reach) & (distance[a] < reach + 0.2)
            fallbacks += not band.any()
            bands[a, p] = set((band if band.any() else pairs.negative[a]).nonzero().flatten().tolist())
            picks.setdefault((a, p), set()).add(n)
    assert len(picks) == 32 * 3  # every positive has its turn
    assert all(picks[key] <= bands[key] for key in picks)
    assert sum(map(len, picks.values())) > 0.9 * sum(map(len, bands.values()))
    assert 0 < fallbacks < 150 * 32 / 4


def test_alone_in_its_class_gives_nothing():
    similarity, pairs = compare(torch.randn(4, 3), torch.tensor([0, 1, 1, 1]))
    assert Semihard()(similarity, pairs).valid.tolist() == [False, True, True, True]
