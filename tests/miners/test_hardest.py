import torch
from pytorch_metric_learning.miners import BatchHardMiner

from unimetric.geometry import compare
from unimetric.miners.hardest import Hardest


def test_equals_the_loop_and_pytorch_metric_learning():
    torch.manual_seed(0)
    embeddings, labels = torch.randn(12, 6), torch.tensor([0, 1, 0, 1, 1, 2, 3, 2, 3, 0, 1, 4])
    similarity, pairs = compare(embeddings, labels)
    mined = Hardest()(similarity, pairs)
    found = []
    for a in range(12):
        positives, negatives = pairs.positive[a].nonzero().flatten().tolist(), pairs.negative[a].nonzero().flatten().tolist()
        assert bool(mined.valid[a]) == bool(positives)
        if positives:
            found.append((a, min(positives, key=lambda p: similarity[a, p]), max(negatives, key=lambda n: similarity[a, n])))
    triplets = zip(mined.anchor.tolist(), mined.positive.tolist(), mined.negative.tolist(), mined.valid.tolist(), strict=True)
    ours = [(a, p, n) for a, p, n, valid in triplets if valid]
    assert ours == found
    assert ours == [tuple(triplet) for triplet in torch.stack(BatchHardMiner()(embeddings, labels), 1).tolist()]


def test_one_class_gives_nothing():
    similarity, pairs = compare(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    assert not Hardest()(similarity, pairs).valid.any()
