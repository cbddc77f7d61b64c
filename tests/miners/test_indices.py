"""Miners in other loops: `(embeddings, labels) -> indices`, as in pytorch-metric-learning."""

import pytest
import torch
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners as pml_miners

from unimetric.geometry import Pairs, compare
from unimetric.spec import create, names


@pytest.mark.parametrize("name", names("miners"))
def test_embeddings_and_labels_give_indices(name):
    torch.manual_seed(0)
    embeddings, labels = torch.randn(24, 8, requires_grad=True), torch.arange(24) // 4
    found = create("miners", name)(embeddings, labels)
    miner = create("miners", name)  # another one, because some draw
    mined = miner(*compare(embeddings.detach(), labels))
    if miner.gives is Pairs:
        anchor, positive, other, negative = found
        assert torch.equal(torch.stack([anchor, positive], 1), mined.positive.nonzero())
        assert torch.equal(torch.stack([other, negative], 1), mined.negative.nonzero())
    else:
        anchor, positive, negative = found
        other = anchor
        assert torch.equal(anchor, mined.anchor[mined.valid]) and torch.equal(negative, mined.negative[mined.valid])
    assert len(anchor) and all(index.dtype == torch.int64 for index in found)
    if name != "rho":  # switches a negative with a positive on purpose
        assert (labels[anchor] == labels[positive]).all() and (labels[other] != labels[negative]).all()
    loss = pml_losses.TripletMarginLoss()(embeddings, labels, found)
    assert loss.isfinite()


def test_multi_similarity_equals_pytorch_metric_learning():
    torch.manual_seed(1)
    embeddings, labels = torch.randn(30, 8), torch.randint(6, (30,))
    own = create("miners", "multi_similarity(epsilon=0.1)")(embeddings, labels)
    theirs = pml_miners.MultiSimilarityMiner(epsilon=0.1)(embeddings, labels)
    for first, second in ((own[:2], theirs[:2]), (own[2:], theirs[2:])):
        assert {*zip(*(index.tolist() for index in first), strict=True)} == {*zip(*(index.tolist() for index in second), strict=True)}
