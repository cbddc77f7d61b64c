"""BN-Inception against a literal walk through the Caffe network, layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unimetric.spec import create

# Input, 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3, projection, as the released network's tensors have them.
CAFFE = {
    "3a": (192, 64, 64, 64, 64, 96, 32),
    "3b": (256, 64, 64, 96, 64, 96, 64),
    "3c": (320, 0, 128, 160, 64, 96, 0),
    "4a": (576, 224, 64, 96, 96, 128, 128),
    "4b": (576, 192, 96, 128, 96, 128, 128),
    "4c": (576, 160, 128, 160, 128, 160, 128),
    "4d": (608, 96, 128, 192, 160, 192, 128),
    "4e": (608, 0, 128, 192, 192, 256, 0),
    "5a": (1056, 352, 192, 320, 160, 224, 128),
    "5b": (1024, 352, 192, 320, 192, 224, 128),
}


def caffe_file(*, rows: bool) -> dict[str, Tensor]:
    """Random weights in the released layout; the oldest conversions have BatchNorm's vectors as rows (1, C)."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}

    def layer(name: str, before: int, after: int, side: int) -> None:
        state[f"{name}.weight"] = torch.randn(after, before, side, side, generator=generator) * (2 / (before * side**2)) ** 0.5
        state[f"{name}.bias"] = 0.1 * torch.randn(after, generator=generator)
        for key in ("weight", "bias", "running_mean", "running_var"):
            value = 0.1 * torch.randn(1, after, generator=generator)
            value = 1 + value if key == "weight" else 1 + value.abs() if key == "running_var" else value
            state[f"{name}_bn.{key}"] = value if rows else value[0]

    layer("conv1_7x7_s2", 3, 64, 7)
    layer("conv2_3x3_reduce", 64, 64, 1)
    layer("conv2_3x3", 64, 192, 3)
    for block, (before, one, reduce, three, reduce_double, double, projection) in CAFFE.items():
        name = f"inception_{block}_"
        if one:
            layer(name + "1x1", before, one, 1)
        layer(name + "3x3_reduce", before, reduce, 1)
        layer(name + "3x3", reduce, three, 3)
        layer(name + "double_3x3_reduce", before, reduce_double, 1)
        layer(name + "double_3x3_1", reduce_double, double, 3)
        layer(name + "double_3x3_2", double, double, 3)
        if projection:
            layer(name + "pool_proj", before, projection, 1)
    return state | {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}


def literal(state: dict[str, Tensor], image: Tensor) -> Tensor:
    """Blue, green, red from 0 to 255, less (104, 117, 128), to the last map."""

    def layer(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        x = functional.conv2d(x, weight, state[f"{name}.bias"], stride, weight.shape[-1] // 2)
        mean, var, scale, shift = (state[f"{name}_bn.{key}"].reshape(-1, 1, 1) for key in ("running_mean", "running_var", "weight", "bias"))
        return ((x - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)

    x = layer(image, "conv1_7x7_s2", 2)
    x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
    x = layer(layer(x, "conv2_3x3_reduce"), "conv2_3x3")
    x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
    for block in CAFFE:
        name, stride = f"inception_{block}_", 2 if block in ("3c", "4e") else 1
        three = layer(layer(x, name + "3x3_reduce"), name + "3x3", stride)
        double = layer(layer(layer(x, name + "double_3x3_reduce"), name + "double_3x3_1"), name + "double_3x3_2", stride)
        if stride == 2:
            x = torch.cat([three, double, functional.max_pool2d(x, 3, 2, ceil_mode=True)], 1)
            continue
        # An average over nine places, zeros beyond the edge counted, as Caffe does.
        pooled = functional.max_pool2d(x, 3, 1, 1) if block == "5b" else functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1)), 3, 1)
        x = torch.cat([layer(x, name + "1x1"), three, double, layer(pooled, name + "pool_proj")], 1)
    return x


@pytest.mark.parametrize("rows", [False, True])
def test_a_caffe_file_gives_what_caffe_computes(rows: bool, tmp_path: Path) -> None:
    state = caffe_file(rows=rows)
    torch.save(state, tmp_path / "bn_inception.pth")
    backbone = create("backbones", f"bn_inception(weights='{tmp_path / 'bn_inception.pth'}')").eval()
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    with torch.no_grad():
        ours = backbone((pixels - mean) / std)
        map_ = literal(state, 255 * pixels[:, [2, 1, 0]] - torch.tensor([104.0, 117.0, 128.0]).view(3, 1, 1))
    assert map_.shape == (2, 1024, 2, 2) and map_.std() > 0.1
    expected = map_.flatten(2).transpose(1, 2)
    torch.testing.assert_close(ours, torch.cat([expected.mean(1, keepdim=True), expected], 1), rtol=1e-3, atol=1e-3)


def test_size_is_that_of_the_released_network() -> None:
    with torch.device("meta"):
        backbone = create("backbones", "bn_inception")
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 11_295_240 - 1025 * 1000


@pytest.mark.parametrize(("side", "positions"), [(224, 49), (227, 49), (232, 64), (256, 64), (97, 9)])
def test_pictures_of_any_side_pass(side: int, positions: int) -> None:
    with torch.device("meta"):
        assert create("backbones", "bn_inception").eval()(torch.empty(2, 3, side, side)).shape == (2, 1 + positions, 1024)


def test_frozen_batchnorm_stays_frozen() -> None:
    backbone = create("backbones", "bn_inception(frozen_batchnorm=True)").train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    before = norms[-1].running_mean.clone()
    backbone(torch.randn(2, 3, 64, 64)).sum().backward()
    assert torch.equal(norms[-1].running_mean, before)
    assert all(parameter.grad is None for norm in norms for parameter in norm.parameters())
    learning = create("backbones", "bn_inception(frozen_batchnorm=True, train_affine=True)").train()
    assert all(parameter.requires_grad for parameter in learning.parameters())
