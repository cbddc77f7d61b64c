"""Four heads, and how they become one embedding."""

import math

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.spec import create


def test_the_embedding_is_the_weighted_directions_normalised():
    torch.manual_seed(0)
    head = create("heads", "diva(dim=3, weights=(0.5, 1.5, 1.0, 2.0))", features=5).double()
    tokens = torch.randn(4, 6, 5).double()
    assert head.dim == 12
    assert head.dims == (3, 3, 3, 3)
    branches = head.branches(tokens)
    assert [tuple(branch.shape) for branch in branches] == [(4, 3)] * 4
    for row in range(4):
        numbers = []
        for number, weight in enumerate((0.5, 1.5, 1.0, 2.0)):
            matrix, shift = head.layer.weight[3 * number : 3 * number + 3], head.layer.bias[3 * number : 3 * number + 3]
            raw = [(tokens[row, 0] @ matrix[k] + shift[k]).item() for k in range(3)]
            assert raw == pytest.approx(branches[number][row].tolist(), rel=1e-9)
            length = math.sqrt(sum(x * x for x in raw))
            numbers += [weight * x / length for x in raw]
        whole = math.sqrt(sum(x * x for x in numbers))
        assert head(tokens)[row].tolist() == pytest.approx([x / whole for x in numbers], rel=1e-9)


def test_a_weight_for_each_head():
    with pytest.raises(UnimetricError, match="four branches"):
        create("heads", "diva(weights=(1, 1))", features=5)
