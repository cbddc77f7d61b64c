"""Backbones: pictures to tokens, the summary first."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from unimetric.errors import UnimetricError
from unimetric.spec import create

SHAPES = {
    "small": (32, (5, 128)),
    "timm(name='resnet18')": (64, (5, 512)),
    "timm(name='test_vit', image_size=64)": (64, (17, 64)),
    "timm(name='mobilenetv3_small_050')": (64, (5, 288)),
    "timm(name='swin_tiny_patch4_window7_224', image_size=64)": (64, (5, 768)),
    "timm(name='vit_small_patch14_dinov2', image_size=56)": (56, (17, 384)),
    "efficientnet_lite(pretrained=False)": (64, (5, 1280)),
}


@pytest.mark.parametrize("text", SHAPES)
def test_tokens_have_the_documented_shape_and_the_summary_is_the_networks_own(text: str) -> None:
    side, shape = SHAPES[text]
    backbone = create("backbones", text).eval()
    images = torch.randn(2, 3, side, side)
    with torch.inference_mode():
        tokens = backbone(images)
    assert tokens.shape == (2, *shape)
    assert backbone.channels == shape[1]
    assert len(backbone.mean) == len(backbone.std) == 3
    if text.startswith("timm") and backbone.own_summary:
        network = backbone.network
        with torch.inference_mode():
            own = network.forward_head(network.forward_features(images), pre_logits=True)
        torch.testing.assert_close(tokens[:, 0], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("cait_xxs24_224", 196),
        ("convit_tiny", 196),
        ("xcit_nano_12_p16_224", 196),
        ("volo_d1_224", 196),
        ("coat_lite_tiny", 49),
        ("pit_ti_224", 0),
    ],
)
def test_a_class_token_is_no_position(name: str, positions: int) -> None:
    """Of networks that do not say how many tokens stand before the positions."""
    with torch.device("meta"):
        assert create("backbones", f"timm(name='{name}')").eval()(torch.zeros(1, 3, 224, 224)).shape[1] == 1 + positions


def test_frozen_batchnorm_stays_frozen() -> None:
    backbone = create("backbones", "timm(name='resnet18', frozen_batchnorm=True)").train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    before = norms[0].running_mean.clone()
    backbone(torch.randn(4, 3, 64, 64)).sum().backward()
    assert torch.equal(norms[0].running_mean, before)
    assert all(parameter.grad is None for norm in norms for parameter in norm.parameters())
    learning = create("backbones", "timm(name='resnet18', frozen_batchnorm=True, train_affine=True)").train()
    learning(torch.randn(4, 3, 64, 64)).sum().backward()
    norm = next(module for module in learning.modules() if isinstance(module, nn.BatchNorm2d))
    assert norm.weight.grad is not None
    assert not norm.training


@pytest.mark.parametrize("layout", ["plain.safetensors", "plain.pth", "state_dict.pth", "module.pth", "classifier.safetensors"])
def test_weights_in_common_wrappings_load(layout: str, tmp_path: Path) -> None:
    network = timm.create_model("test_resnet", num_classes=0 if layout != "classifier.safetensors" else 10)
    state = network.state_dict()
    path = tmp_path / layout
    if layout.startswith("state_dict"):
        torch.save({"state_dict": state, "epoch": 3}, path)
    elif layout.startswith("module"):
        torch.save({f"module.{key}": value for key, value in state.items()}, path)
    elif layout.endswith(".pth"):
        torch.save(state, path)
    else:
        save_file(state, path)
    backbone = create("backbones", f"timm(name='test_resnet', weights='{path}')")
    for key, value in backbone.network.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_positions_are_resampled_to_the_picture(tmp_path: Path) -> None:
    save_file(timm.create_model("test_vit", img_size=160, num_classes=0).state_dict(), tmp_path / "a.safetensors")
    backbone = create("backbones", f"timm(name='test_vit', image_size=64, weights='{tmp_path / 'a.safetensors'}')")
    assert backbone(torch.randn(1, 3, 64, 64)).shape == (1, 17, 64)


def test_the_stride_of_the_original_resnet() -> None:
    backbone = create("backbones", "timm(name='resnet50', stride_first=True)")
    assert [layer[0].conv1.stride for layer in (backbone.network.layer2, backbone.network.layer3, backbone.network.layer4)] == [(2, 2)] * 3
    assert backbone.network.layer2[0].conv2.stride == (1, 1)
    with pytest.raises(UnimetricError, match="requires bottleneck blocks"):
        create("backbones", "timm(name='test_vit', stride_first=True)")


def test_real_imagenet_weights_come_inside_a_package() -> None:
    """Known features, not just shapes: two crops of one picture are more alike than two pictures."""
    backbone = create("backbones", "efficientnet_lite").eval()
    from matplotlib import cbook
    from PIL import Image

    image = Image.open(cbook.get_sample_data("grace_hopper.jpg")).convert("RGB").resize((256, 300))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(300, 256, 3).permute(2, 0, 1).float() / 127.5 - 1
    noise = torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    with torch.inference_mode():
        one, other, none = backbone(torch.stack([pixels[:, :224, :224], pixels[:, 40:264, 20:244], noise]))[:, 0]
    same, different = torch.cosine_similarity(one, other, 0), torch.cosine_similarity(one, none, 0)
    assert same > 0.6
    assert different < 0.5 * same


def test_what_is_refused() -> None:
    with pytest.raises(UnimetricError, match="no network `resnet5000`"):
        create("backbones", "timm(name='resnet5000')")
    with pytest.raises(UnimetricError, match="only one of `pretrained` and `weights`"):
        create("backbones", "timm(name='test_resnet', pretrained=True, weights='a.pth')")
    with pytest.raises(UnimetricError, match="`number` must be one of `0`, `1`, `2`, got 7"):
        create("backbones", "efficientnet_lite(number=7)")


def test_frozen_patches_are_not_trained():
    backbone = create("backbones", "timm(name='test_vit', image_size=32, frozen_patches=True)")
    frozen = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    assert frozen == {"network.patch_embed.proj.weight", "network.patch_embed.proj.bias"}
    with pytest.raises(UnimetricError, match="`frozen_patches` requires a patch embedding, but `test_resnet` has none"):
        create("backbones", "timm(name='test_resnet', frozen_patches=True)")
