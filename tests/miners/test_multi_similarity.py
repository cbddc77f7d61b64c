import pytest
import torch
from pytorch_metric_learning.miners import MultiSimilarityMiner

from unimetric.geometry import compare
from unimetric.miners.multi_similarity import MultiSimilarity


@pytest.mark.parametrize("epsilon", [0.1, -0.2])
def test_equals_the_loop_and_pytorch_metric_learning(epsilon):
    torch.manual_seed(0)
    embeddings, labels = torch.randn(12, 6, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 2, 3, 2, 3, 0, 1, 4])
    s, pairs = compare(embeddings, labels)
    kept = MultiSimilarity(epsilon=epsilon)(s, pairs)
    positive, negative = torch.zeros_like(kept.positive), torch.zeros_like(kept.negative)
    for a in range(12):
        positives, negatives = pairs.positive[a].nonzero().flatten().tolist(), pairs.negative[a].nonzero().flatten().tolist()
        for p in positives:
            positive[a, p] = s[a, p] - epsilon < max(s[a, n] for n in negatives)
        for n in negatives if positives else []:
            negative[a, n] = s[a, n] + epsilon > min(s[a, p] for p in positives)
    assert torch.equal(kept.positive, positive)
    assert torch.equal(kept.negative, negative)
    assert 0 < positive.sum() < pairs.positive.sum()
    first, p, second, n = MultiSimilarityMiner(epsilon=epsilon)(embeddings, labels)
    assert {*zip(first.tolist(), p.tolist(), strict=True)} == {tuple(pair) for pair in positive.nonzero().tolist()}
    assert {*zip(second.tolist(), n.tolist(), strict=True)} == {tuple(pair) for pair in negative.nonzero().tolist()}
