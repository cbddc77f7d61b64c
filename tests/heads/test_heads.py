"""Heads: tokens to raw embeddings."""

from __future__ import annotations

import re

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.spec import create


def test_linear_is_one_layer_on_the_summary() -> None:
    head = create("heads", "linear(dim=3)", features=5)
    tokens = torch.randn(4, 6, 5)
    torch.testing.assert_close(head(tokens), tokens[:, 0] @ head.layer.weight.T + head.layer.bias)
    assert head.dim == 3


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_linear_pools_the_positions(pool: str) -> None:
    head = create("heads", f"linear(dim=3, pool='{pool}')", features=5).double()
    tokens = torch.randn(4, 6, 5, dtype=torch.float64)
    expected = torch.empty(4, 3, dtype=torch.float64)
    for i, image in enumerate(tokens):
        columns = [image[1:, c].tolist() for c in range(5)]  # without the global token
        pooled = torch.tensor([max(each) if pool == "max" else sum(each) / len(each) for each in columns], dtype=torch.float64)
        expected[i] = head.layer.weight @ pooled + head.layer.bias
    torch.testing.assert_close(head(tokens), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(UnimetricError, match="requires spatial positions"):
        head(tokens[:, :1])


def test_linear_max_passes_the_gradient_to_the_maximum() -> None:
    head = create("heads", "linear(dim=1, pool='max', bias=False)", features=2)
    tokens = torch.tensor([[[9.0, 9.0], [1.0, 5.0], [2.0, 4.0]]], requires_grad=True)
    head(tokens).sum().backward()
    first, second = head.layer.weight[0].tolist()
    assert tokens.grad[0].tolist() == [[0, 0], [0, second], [first, 0]]


def test_linear_kaiming_init() -> None:
    """A normal distribution with variance 2 / outputs and a zero bias; the default is that of torch."""
    torch.manual_seed(0)
    layer = create("heads", "linear(dim=64, init='kaiming')", features=500).layer
    weight = layer.weight.detach().double()
    std = (2 / 64) ** 0.5
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert (weight / std).pow(4).mean().item() == pytest.approx(3, abs=0.3)  # 1.8 if uniform
    assert (layer.bias == 0).all()
    assert create("heads", "linear(dim=3, bias=False, init='kaiming')", features=5).layer.bias is None
    for text in ("linear(dim=4)", "linear(dim=4, init='torch')"):
        torch.manual_seed(0)
        made = create("heads", text, features=5).layer
        torch.manual_seed(0)
        expected = torch.nn.Linear(5, 4)
        assert torch.equal(made.weight, expected.weight) and torch.equal(made.bias, expected.bias)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear(pool='min')", "`pool` must be one of `summary`, `mean`, `max`, got 'min'"),
        ("linear(init='zero')", "`init` must be one of `torch`, `kaiming`, got 'zero'"),
        ("linear(init='kaiming', orthogonal=True)", "`orthogonal=True` requires `init='torch'`"),
        ("mlp(layers=0)", "`layers` must be at least 1, got 0"),
    ],
)
def test_heads_reject_invalid_arguments(text: str, message: str) -> None:
    with pytest.raises(UnimetricError, match=re.escape(message)) as error:
        create("heads", text, features=5)
    assert error.value.hint


def test_an_orthogonal_start() -> None:
    layer = create("heads", "linear(dim=3, orthogonal=True)", features=5).layer
    torch.testing.assert_close(layer.weight @ layer.weight.T, torch.eye(3))
    assert (layer.bias == 0).all()
    assert create("heads", "linear(dim=3, bias=False, orthogonal=True)", features=5).layer.bias is None


def test_mlp_has_the_parameters_of_puma() -> None:
    head = create("heads", "mlp", features=384)
    assert sum(parameter.numel() for parameter in head.parameters()) == 5_247_104
    assert head(torch.randn(2, 3, 384)).shape == (2, 128)


def test_identity_is_the_summary() -> None:
    tokens = torch.randn(4, 6, 5)
    head = create("heads", "identity", features=5)
    assert torch.equal(head(tokens), tokens[:, 0])
    assert head.dim == 5
