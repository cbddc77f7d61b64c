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
    with pytest.raises(UnimetricError, match="`weights` must be a list of 4 numbers"):
        create("heads", "diva(weights=(1, 1))", features=5)


@pytest.mark.parametrize("own", ["(0.75, 1.25, 1.25, 1.25)", "(-0.3, 2.0, 1.0, 0.1)"])
def test_variants_are_heads_with_published_weights(own):
    torch.manual_seed(0)
    head = create("heads", f"diva(dim=3, weights={own})", features=5).double()
    tokens = torch.randn(4, 6, 5).double()
    found = head.variants(head(tokens))
    assert list(found) == ["weights=1,1,1,1", "weights=0.75,1.25,1.25,1.25", "weights=0.5,1.5,1.5,1.5"]
    for name, embeddings in found.items():
        other = create("heads", f"diva(dim=3, weights=({name.removeprefix('weights=')}))", features=5).double()
        other.load_state_dict(head.state_dict())
        torch.testing.assert_close(embeddings, other(tokens), rtol=1e-9, atol=1e-12)


def test_variants_need_every_branch():
    head = create("heads", "diva(dim=3, weights=(1, 1, 1, 0))", features=5)
    assert head.variants(head(torch.randn(4, 6, 5))) == {}
