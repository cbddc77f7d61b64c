import torch

from unimetric.geometry import compare
from unimetric.miners.softhard import Softhard


def test_draws_from_the_hard_sets_and_from_all_of_them():
    torch.manual_seed(0)
    labels = torch.arange(4).repeat(4)
    similarity, pairs = compare(torch.randn(16, 4), labels)
    distance = (2 - 2 * similarity).sqrt()
    hard_positives, hard_negatives = [], []
    for a in range(16):
        positives, negatives = pairs.positive[a].nonzero().flatten().tolist(), pairs.negative[a].nonzero().flatten().tolist()
        nearest, farthest = min(distance[a, n] for n in negatives), max(distance[a, p] for p in positives)
        hard_positives.append({p for p in positives if distance[a, p] > nearest} or set(positives))
        hard_negatives.append({n for n in negatives if distance[a, n] < farthest} or set(negatives))
    assert any(len(hard) < 3 for hard in hard_positives)
    assert any(len(hard) < 12 for hard in hard_negatives)
    miner = Softhard()
    drawn = [miner(similarity, pairs) for _ in range(300)]
    assert all(mined.valid.all() for mined in drawn)
    for a in range(16):
        assert {int(mined.positive[a]) for mined in drawn} == hard_positives[a]
        assert {int(mined.negative[a]) for mined in drawn} == hard_negatives[a]


def test_a_solved_batch_falls_back_to_any():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    similarity, pairs = compare(torch.eye(2)[labels], labels)
    miner = Softhard()
    drawn = [miner(similarity, pairs) for _ in range(100)]
    assert {int(mined.positive[0]) for mined in drawn} == {1, 2}
    assert {int(mined.negative[0]) for mined in drawn} == {3, 4, 5}
