import math

import pytest
import torch
from pytorch_metric_learning.losses import HistogramLoss

from unimetric.geometry import unit
from unimetric.losses.histogram import Histogram


@pytest.mark.parametrize("nodes", [11, 65])
def test_equals_the_loop(case, nodes):
    def density(columns):
        counts, width, pairs = [0.0] * nodes, 2 / (nodes - 1), 0
        for a in range(10):
            for j in columns[a]:
                s = (unit(case.embeddings[a]) @ unit(case.references[j])).item()
                pairs += 1
                for r in range(nodes):
                    counts[r] += max(0.0, 1 - abs(s - (-1 + r * width)) / width)  # the triangle around node r
        return [count / pairs for count in counts]

    positive, negative = density(case.positives), density(case.negatives)
    expected = sum(negative[r] * sum(positive[: r + 1]) for r in range(nodes))
    assert math.isclose(Histogram(nodes=nodes)(case.embeddings, case.labels, case.memory).item(), expected, rel_tol=1e-9)


def test_gradient(case):
    assert torch.autograd.gradcheck(lambda z: Histogram(nodes=11)(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning():
    """It counts bins, which are one fewer than nodes, and cannot take a similarity of exactly 1."""
    torch.manual_seed(0)
    embeddings, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(4).repeat(3)
    with pytest.warns(UserWarning, match="non-tuple sequence"):
        peer = HistogramLoss(n_bins=64)(embeddings, labels)
    torch.testing.assert_close(Histogram(nodes=65)(embeddings, labels), peer, rtol=1e-6, atol=0)


def test_separated_is_zero_and_indistinguishable_is_a_half():
    line = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    assert Histogram()(line, torch.tensor([0, 0, 1, 1])) == 0
    torch.manual_seed(0)
    mixed = Histogram()(torch.randn(300, 16), torch.arange(10).repeat(30))
    assert math.isclose(mixed.item(), 0.5, abs_tol=0.05)
