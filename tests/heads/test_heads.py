"""Heads: tokens to raw embeddings."""

from __future__ import annotations

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.spec import create


def test_linear_is_one_layer_on_the_summary() -> None:
    head = create("heads", "linear(dim=3)", features=5)
    tokens = torch.randn(4, 6, 5)
    torch.testing.assert_close(head(tokens), tokens[:, 0] @ head.layer.weight.T + head.layer.bias)
    assert head.dim == 3


def test_linear_on_the_mean_of_the_positions() -> None:
    head = create("heads", "linear(dim=3, pool='mean')", features=5)
    tokens = torch.randn(4, 6, 5)
    torch.testing.assert_close(head(tokens), tokens[:, 1:].mean(1) @ head.layer.weight.T + head.layer.bias)
    with pytest.raises(UnimetricError, match="summary alone"):
        head(tokens[:, :1])
    with pytest.raises(UnimetricError, match="cannot be 'max'"):
        create("heads", "linear(pool='max')", features=5)


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
