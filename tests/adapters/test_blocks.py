"""Adapters in transformers with other blocks: DINOv3, EVA-02, SigLIP 2 and registers, with random weights."""

from __future__ import annotations

import copy

import pytest
import torch

from unimetric.adapters._vit import embed_patches, extend_rope, run_block
from unimetric.spec import bind, create

#: DINOv3 with rotary positions, registers and a bias of q and v; EVA-02 with three separate projections, SwiGLU and sub-norms; SigLIP's
#: attention pooling without a class token; DINOv2 with registers.
NETWORKS = {
    "dinov3": ("vit_tiny_patch16_dinov3_qkvb", 64),
    "eva02": ("eva02_tiny_patch14_224", 56),
    "siglip2": ("vit_base_patch32_siglip_256", 64),
    "registers": ("vit_small_patch14_reg4_dinov2", 56),
}
SILENT = ["linear_probe", "stochastic_adapter(rank=4)", "lora(rank=4, targets='qkv')", "adaptformer(rank=4)"]
LOUD = ["prompt_pool(length=3)", "puma(rank=4, lora_rank=4)", "vpt(length=3)", "vpt(length=3, deep=True)"]


def backbone(name: str):
    """Two blocks of a network. Biases and scales are drawn, because those that are zero would hide mistakes."""
    torch.manual_seed(0)
    network, size = NETWORKS[name]
    rotary = name in ("dinov3", "eva02")  # whose buffers are computed when they are built
    with torch.no_grad():
        with torch.device("cpu" if rotary else "meta"):
            made = create("backbones", f"timm(name='{network}', image_size={size})")
        made.network.blocks = made.network.blocks[:2]
        made = made if rotary else made.to_empty(device="cpu")
        for parameter in made.parameters():
            parameter.normal_(0, 0.05)
        for module in made.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.add_(1)
    return made.eval(), torch.randn(2, 3, size, size)


def adapt(text: str, made):
    part, arguments = bind("adapters", text)
    return part(made, **arguments).eval()


@pytest.fixture(scope="module")
def opened():
    return {name: backbone(name) for name in NETWORKS}


@pytest.mark.parametrize("name", NETWORKS)
def test_all_adapters_fit_all_transformers(name, opened):
    made, images = opened[name]
    expected = made(images).detach()
    assert made.find_transformer() is made.network
    patches = (images.shape[-1] // made.network.patch_embed.patch_size[0]) ** 2
    assert expected.shape == (2, 1 + patches, made.channels)
    for text in [*SILENT, *LOUD]:
        adapted = adapt(text, copy.deepcopy(made))
        found = adapted(images)
        assert found.shape == expected.shape, text
        if text in SILENT:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=text)
        else:
            assert not torch.allclose(found, expected, atol=1e-3), text
        if text != "linear_probe":
            found.square().mean().backward()
            trained = [weight for weight in adapted.parameters() if weight.requires_grad]
            assert any(weight.grad is not None and weight.grad.any() for weight in trained), text


@pytest.mark.parametrize("name", ["dinov3", "eva02"])
def test_merged_updates_equal_the_adapter(name, opened):
    made, images = opened[name]
    adapted = adapt("lora(rank=4, targets='qv')", copy.deepcopy(made))
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
        expected = adapted(images)
        assert not torch.allclose(expected, made(images), atol=1e-3)
        torch.testing.assert_close(adapted.merged()(images), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["dinov3", "eva02"])
def test_prompts_are_not_rotated_and_patches_keep_their_position(name, opened):
    made, images = opened[name]
    network = copy.deepcopy(made.network)
    prefix, count = network.num_prefix_tokens, 3
    with torch.no_grad():
        x, _, rope = embed_patches(network, images)
        x = torch.cat([x[:, :prefix], torch.randn(2, count, x.shape[-1]), x[:, prefix:]], 1)
        found = run_block(network.blocks[0], x, None, None, rope=extend_rope(rope, count))
        network.blocks[0].attn.num_prefix_tokens = prefix + count  # timm itself leaves these tokens unrotated
        torch.testing.assert_close(found, network.blocks[0](x, rope=rope), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found, network.blocks[0](x, rope=rope.roll(1, 0)), atol=1e-4)
