"""GoogLeNet against torchvision's own forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import GoogLeNet

from unimetric.backbones import IMAGENET_MEAN, IMAGENET_STD
from unimetric.errors import UnimetricError
from unimetric.spec import create


def test_a_torchvision_file_gives_what_torchvision_computes(tmp_path: Path) -> None:
    """Its class scores from its own statistics, and ours from pixels between -1 and 1."""
    torch.manual_seed(0)
    reference = GoogLeNet(num_classes=7, transform_input=True, init_weights=False)
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            if tensor.is_floating_point():
                noise = 0.1 * torch.randn_like(tensor)
                tensor.copy_(1 + noise.abs() if name.endswith("running_var") else tensor + 0.3 * noise)
    torch.save(reference.eval().state_dict(), tmp_path / "googlenet.pth")
    backbone = create("backbones", f"googlenet(weights='{tmp_path / 'googlenet.pth'}')").eval()
    pixels = torch.rand(2, 3, 67, 67)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    own_mean, own_std = (torch.tensor(values).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    with torch.no_grad():
        ours = reference.fc(backbone((pixels - own_mean) / own_std)[:, 0])
        scores = reference((pixels - mean) / std)
    assert scores.std() > 1e-3
    torch.testing.assert_close(ours, scores, rtol=1e-3, atol=1e-4)


def test_shapes_and_size() -> None:
    with torch.device("meta"):
        backbone = create("backbones", "googlenet").eval()
        assert backbone(torch.empty(2, 3, 227, 227)).shape == (2, 50, 1024)
        assert backbone(torch.empty(2, 3, 224, 224)).shape == (2, 50, 1024)
    # torchvision's published number, less the classifier
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 6_624_904 - 1025 * 1000


def test_frozen_batchnorm_stays_frozen() -> None:
    with torch.device("meta"):
        backbone = create("backbones", "googlenet(frozen_batchnorm=True)").train()
        learning = create("backbones", "googlenet(frozen_batchnorm=True, train_affine=True)").train()
    assert not any(module.training for module in backbone.modules() if isinstance(module, nn.BatchNorm2d))
    assert not any(p.requires_grad for m in backbone.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    assert all(parameter.requires_grad for parameter in learning.parameters())


def test_what_is_refused() -> None:
    with pytest.raises(UnimetricError, match="only one of `pretrained` and `weights`"):
        create("backbones", "googlenet(pretrained=True, weights='a.pth')")
