import math

import pytest
import torch
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from unimetric.geometry import Triplets, unit
from unimetric.losses.multi_similarity import MultiSimilarity


@pytest.mark.parametrize("kept_only", [True, False])
@pytest.mark.parametrize("epsilon", [0.1, -0.3, 9.0])
def test_equals_the_loop(case, epsilon, kept_only):
    terms = []
    for a in case.anchors:
        s = [(unit(case.embeddings[a]) @ unit(r)).item() for r in case.references]
        positives = [p for p in case.positives[a] if s[p] - epsilon < max(s[n] for n in case.negatives[a])]
        negatives = [n for n in case.negatives[a] if s[n] + epsilon > min(s[p] for p in case.positives[a])]
        if positives and negatives:
            pull = math.log1p(sum(math.exp(-2 * (s[p] - 0.4)) for p in positives)) / 2
            terms.append(pull + math.log1p(sum(math.exp(10 * (s[n] - 0.4)) for n in negatives)) / 10)
    loss = MultiSimilarity(beta=10.0, base=0.4, kept_only=kept_only, miner=f"multi_similarity(epsilon={epsilon})")
    expected = sum(terms) / (len(terms) if kept_only else 10)
    assert math.isclose(loss(case.embeddings, case.labels, case.memory).item(), expected, rel_tol=1e-9)


def test_gradient(case):
    assert torch.autograd.gradcheck(lambda z: MultiSimilarity()(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning_divided_by_the_batch(case):
    """It always divides by the batch; and with no miner it keeps anchors that have only positives or only negatives."""
    if case.memory is None:
        pairs = MultiSimilarityMiner(epsilon=0.1)(case.embeddings, case.labels)
        peer = MultiSimilarityLoss(alpha=2, beta=40, base=0.5)(case.embeddings, case.labels, pairs)
        torch.testing.assert_close(MultiSimilarity(kept_only=False)(case.embeddings, case.labels), peer, rtol=1e-9, atol=0)


def test_nothing_kept_is_zero_with_a_gradient():
    embeddings = torch.eye(2)[torch.tensor([0, 0, 1, 1])].requires_grad_()
    loss = MultiSimilarity()(embeddings, torch.tensor([0, 0, 1, 1]))  # solved: no pair is within 0.1 of its rivals
    loss.backward()
    assert loss == 0
    assert not embeddings.grad.any()


def test_reads_the_pairs_of_triplets_as_pytorch_metric_learning_does(case):
    class Given(torch.nn.Module):
        gives = Triplets

        def forward(self, similarity, pairs):
            last = len(triplets) - 1
            return Triplets(*torch.tensor(triplets).T, torch.arange(last + 1) != last)

    if case.memory is None:
        triplets = [(a, p, n) for a in case.anchors for p in case.positives[a] for n in case.negatives[a][::4]]
        triplets.append((9, 9, 0))  # not valid
        peer = MultiSimilarityLoss(beta=40)(case.embeddings, case.labels, tuple(torch.tensor(triplets[:-1]).T))
        ours = MultiSimilarity(kept_only=False, miner=Given())(case.embeddings, case.labels)
        torch.testing.assert_close(ours, peer, rtol=1e-9, atol=0)
