import torch

from unimetric.geometry import compare
from unimetric.miners.all import All


def test_gives_what_it_gets():
    similarity, pairs = compare(torch.randn(6, 3), torch.arange(3).repeat(2))
    assert All()(similarity, pairs) is pairs
