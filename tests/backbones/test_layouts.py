"""A file in each layout gives, in our network, what the library that wrote it computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from unimetric.backbones import fill
from unimetric.backbones._layouts import LAYOUTS, recognize, to_timm
from unimetric.errors import UnimetricError
from unimetric.spec import create

transformers = pytest.importorskip("transformers")


def shaken(network: nn.Module) -> nn.Module:
    """Every tensor random, so that no two of one shape can be exchanged unnoticed: fresh biases are all zero, fresh norms all one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                noise = 0.1 * torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + noise.abs() if name.endswith("running_var") else tensor + 0.3 * noise)
    return network.eval()


def hugging_face(network: Any, folder: Path) -> Path:
    """The file that transformers writes, in the names its hub has."""
    network.save_pretrained(folder)
    return folder / "model.safetensors"


def tokens(text: str, path: Path, images: Tensor) -> Tensor:
    head, _, rest = text.partition("(")
    with torch.no_grad():
        return create("backbones", f"{head}(weights='{path}', {rest}").eval()(images)


def same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 1e-3  # a dead reference would prove nothing
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


TINY = dict(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=32, patch_size=16)


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel", "DeiTModel"])
def test_hugging_face_vit(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eps = dict(layer_norm_eps=1e-6)  # timm's; that of the hub's files, 1e-12, shows where tokens are as small as fresh ones
    config = transformers.DeiTConfig(**TINY, **eps) if kind == "DeiTModel" else transformers.ViTConfig(**TINY, **eps)
    reference: Any = shaken(getattr(transformers, kind)(config))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = (reference.vit if hasattr(reference, "vit") else reference)(images).last_hidden_state
    name = "deit_tiny_distilled_patch16_224" if kind == "DeiTModel" else "vit_tiny_patch16_224"
    path = hugging_face(reference, tmp_path)
    assert recognize(load_file(path)).name == "Hugging Face ViT"
    ours = tokens(f"timm(name='{name}', image_size=32)", path, images)
    same(ours[:, 1:], theirs[:, -4:])
    if kind != "DeiTModel":  # a distilled one has two summaries
        same(ours[:, 0], theirs[:, 0])
    if kind == "ViTForImageClassification":
        torch.save(reference.state_dict(), tmp_path / "memory.pth")  # other names than in the file, in transformers 5
        same(tokens(f"timm(name='{name}', image_size=32)", tmp_path / "memory.pth", images), theirs)


def facebook(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's DINOv2 file under the names of the original release."""
    out, query = {}, ".attention.attention.query."
    for key, value in state.items():
        if query in key:
            value = torch.cat([state[key.replace(query, f".attention.attention.{word}.")] for word in ("query", "key", "value")])
            key = key.replace(query, ".attn.qkv.")
        elif ".attention.attention." in key:
            continue
        key = key.replace("embeddings.", "", 1).replace("patch_embeddings.projection", "patch_embed.proj")
        key = (
            key.replace("position_embeddings", "pos_embed")
            .replace("encoder.layer.", "blocks.")
            .replace("attention.output.dense", "attn.proj")
        )
        key = re.sub(r"layer_scale(\d)\.lambda1", r"ls\1.gamma", key).replace("layernorm.", "norm.")
        out[key] = value
    return out


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_of_hugging_face_and_of_the_original_release(registers: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = dict(hidden_size=48, num_hidden_layers=4, num_attention_heads=3, image_size=28, patch_size=14, mlp_ratio=4)
    family = "Dinov2WithRegisters" if registers else "Dinov2"
    reference: Any = shaken(getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**size)))
    file = load_file(hugging_face(reference, tmp_path))
    original = facebook(file)
    assert (recognize(file).name, recognize(original).name) == ("Hugging Face ViT", "DINOv2")
    chunks = {re.sub(r"^blocks\.(\d+)\.", lambda match: f"blocks.{int(match[1]) // 2}.{match[1]}.", key): original[key] for key in original}
    assert "blocks.1.3.ls1.gamma" in chunks
    images = torch.randn(2, 3, 28, 28)
    for state in (file, original, chunks):
        # As timm makes `vit_small_patch14_dinov2` and `..._reg4_dinov2`, but small.
        options = dict(embed_dim=48, depth=4, num_heads=3, init_values=1e-5, reg_tokens=registers, no_embed_class=bool(registers))
        network = VisionTransformer(img_size=28, patch_size=14, num_classes=0, **options).eval()
        fill(network, to_timm(state, network.state_dict()), "file")
        with torch.no_grad():
            same(network.forward_features(images), reference(images).last_hidden_state)


def test_positions_are_resampled_where_the_class_token_has_none() -> None:
    backbone = create("backbones", "timm(name='vit_small_patch14_reg4_dinov2', image_size=28)")
    assert backbone._fit_positions({"pos_embed": torch.randn(1, 16, 384)})["pos_embed"].shape == (1, 4, 384)


def openai(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's CLIP file under the names of OpenAI's release."""
    names = {"embeddings.class_embedding": "class_embedding", "embeddings.patch_embedding.": "conv1."}
    names |= {"embeddings.position_embedding.weight": "positional_embedding", "pre_layrnorm": "ln_pre", "post_layernorm": "ln_post"}
    names |= {"encoder.layers.": "transformer.resblocks.", "layer_norm": "ln_", "self_attn.out_proj": "attn.out_proj"}
    names |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    out = {"logit_scale": torch.zeros(())}
    for key, value in state.items():
        if ".self_attn.q_proj." in key:
            value = torch.cat([state[key.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"])
            key = key.replace("self_attn.q_proj.", "attn.in_proj_")
        elif re.search(r"\.[kv]_proj\.", key):
            continue
        for old, new in names.items():
            key = key.replace(old, new)
        out[key.replace("vision_model.", "visual.")] = value
    return out


def test_clip_of_hugging_face_and_of_openai(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = dict(hidden_size=256, num_hidden_layers=10, num_attention_heads=4, intermediate_size=1024, image_size=32, patch_size=16)
    reference: Any = shaken(transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**size, hidden_act="gelu")))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = reference.vision_model(images).pooler_output
    text = "timm(name='vit_xsmall_patch16_clip_224', image_size=32)"
    path = hugging_face(reference, tmp_path)
    same(tokens(text, path, images)[:, 0], theirs)
    state = openai(load_file(path))
    assert recognize(state).name == "OpenAI CLIP"
    found, expected = to_timm(state, {}), to_timm(load_file(path), {})
    for key in [key for key in expected if not key.startswith("visual")]:
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize(("name", "block", "width"), [("resnet18", "basic", 64), ("resnet26", "bottleneck", 256)])
def test_hugging_face_resnet(name: str, block: str, width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(depths=[2] * 4, hidden_sizes=[width * 2**i for i in range(4)], layer_type=block)
    reference: Any = shaken(transformers.ResNetForImageClassification(config))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        theirs = reference.resnet(images).last_hidden_state.flatten(2).transpose(1, 2)
    ours = tokens(f"timm(name='{name}')", hugging_face(reference, tmp_path), images)
    same(ours[:, 1:], theirs)
    same(ours[:, 0], theirs.mean(1))


@pytest.mark.parametrize(
    ("theirs", "ours", "ending"),
    [
        ("resnet18", "resnet18", "pth"),
        ("efficientnet_b0", "efficientnet_b0", "safetensors"),
        ("mobilenet_v2", "mobilenetv2_100", "pth"),
        ("mobilenet_v2", "mobilenetv2_100", "safetensors"),  # sorted by the alphabet: layer 10 before layer 2
        ("mobilenet_v3_small", "mobilenetv3_small_100", "safetensors"),
    ],
)
def test_torchvision_maps(theirs: str, ours: str, ending: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference: Any = shaken(getattr(torchvision.models, theirs)())
    layers = reference.features if hasattr(reference, "features") else nn.Sequential(*list(reference.children())[:-2])
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        map_ = layers(images).flatten(2).transpose(1, 2)
    path = tmp_path / f"weights.{ending}"
    (torch.save if ending == "pth" else save_file)(reference.state_dict(), path)
    same(tokens(f"timm(name='{ours}')", path, images)[:, 1:], map_)


def test_torchvision_vit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(image_size=32, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=5)
    reference: Any = shaken(torchvision.models.VisionTransformer(**sizes))
    save_file(reference.state_dict(), tmp_path / "a.safetensors")
    images = torch.randn(2, 3, 32, 32)
    ours = tokens("timm(name='vit_tiny_patch16_224', image_size=32)", tmp_path / "a.safetensors", images)
    with torch.no_grad():
        same(reference.heads(ours[:, 0]), reference(images))


def test_every_layout_is_told_from_the_others() -> None:
    """A sign that also matched another layout's files would be shadowed, or shadow it, by the order of the table."""
    examples = {
        "SegFormer": "patch_embed1.proj.weight",
        "Hugging Face SegFormer": "segformer.encoder.patch_embeddings.0.proj.weight",
        "torchvision GoogLeNet": "inception3a.branch1.conv.weight",
        "Caffe BN-Inception": "inception_3a_double_3x3_1.weight",
        "Hugging Face CLIP": "vision_model.embeddings.class_embedding",
        "OpenAI CLIP": "visual.class_embedding",
        "torchvision ViT": "encoder.layers.encoder_layer_0.ln_1.weight",
        "Hugging Face ResNet": "resnet.embedder.embedder.convolution.weight",
        "Hugging Face ViT": "dinov2.embeddings.patch_embeddings.projection.weight",
        "DINOv2": "mask_token",
        "torchvision MobileNet or EfficientNet": "features.0.1.running_mean",
        "torchvision ResNet": "layer1.0.conv1.weight",
    }
    assert [layout.name for layout in LAYOUTS] == [*examples, "timm"]
    for name, key in examples.items():
        matching = [layout.name for layout in LAYOUTS if re.search(layout.sign, key)]
        assert matching == [name, "timm"]


def test_timm_names_pass_through() -> None:
    own = create("backbones", "timm(name='test_vit', image_size=32)").network.state_dict()
    assert to_timm(own, own) == own


def test_errors_say_what_was_recognised_and_which_keys_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"patch_embed1.proj.weight": torch.zeros(1)}, path)
    with pytest.raises(UnimetricError, match=r"laid out as SegFormer, which `timm` does not read\n\nhint: use backbone = \"mit\("):
        create("backbones", f"timm(name='resnet18', weights='{path}')")
    with pytest.raises(UnimetricError, match=r"read as SegFormer\): 1\d\d of 1\d\d missing: `.*patch_embeddings.proj.bias`"):
        create("backbones", f"mit(name='b0', weights='{path}')")
    network = torchvision.models.resnet18()
    state = network.state_dict()
    del state["layer3.0.bn1.weight"]
    save_file(state, path)
    with pytest.raises(UnimetricError, match=r"read as torchvision ResNet\): 1 of 120 missing: `layer3.0.bn1.weight`"):
        create("backbones", f"timm(name='resnet18', weights='{path}')")
    save_file(torchvision.models.resnet18().state_dict(), path)
    with pytest.raises(UnimetricError, match=r"missing: `layer1\.2\.conv1\.weight`.* and \d+ more"):
        create("backbones", f"timm(name='resnet34', weights='{path}')")
    for other in ("googlenet()", "bn_inception()", "mit(name='b0')"):
        text = other.replace(")", f", weights='{path}')").replace("(, ", "(")
        with pytest.raises(UnimetricError, match=f"laid out as torchvision ResNet, which `{other.partition('(')[0]}` does not read"):
            create("backbones", text)


def test_half_a_file_is_refused_like_a_wrong_one(tmp_path: Path) -> None:
    """Translation must not stumble over what is not there: the error is ours, and says what is missing."""
    path = tmp_path / "a.safetensors"
    network = f"timm(name='test_vit', image_size=32, weights='{path}')"
    save_file(
        {
            "embeddings.patch_embeddings.projection.weight": torch.zeros(1),
            "encoder.layer.0.attention.attention.query.weight": torch.zeros(1),
        },
        path,
    )
    with pytest.raises(UnimetricError, match=r"read as Hugging Face ViT.* missing: .*`cls_token`"):
        create("backbones", network)
    save_file({"vision_model.embeddings.class_embedding": torch.zeros(64)}, path)
    with pytest.raises(UnimetricError, match=r"read as Hugging Face CLIP.* missing: .*`pos_embed`"):
        create("backbones", network)
    save_file({"pos_embed": torch.zeros(1, 198, 64)}, path)  # 14 x 14 patches and two more tokens
    with pytest.raises(UnimetricError, match=r"`pos_embed` is \(1, 198, 64\), not \(1, 5, 64\)"):
        create("backbones", network)
    save_file(torchvision.models.mobilenet_v3_small().state_dict(), path)
    with pytest.raises(UnimetricError, match="read as torchvision MobileNet or EfficientNet"):
        create("backbones", f"timm(name='mobilenetv2_100', weights='{path}')")


def test_the_backbone_of_a_run_is_a_weights_file(tmp_path: Path) -> None:
    """Names as a run's `model.safetensors` has them."""
    backbone = create("backbones", "timm(name='test_resnet')")
    save_file(
        {f"backbone.{key}": value for key, value in backbone.state_dict().items()} | {"head.weight": torch.zeros(2)},
        tmp_path / "m.safetensors",
    )
    again = create("backbones", f"timm(name='test_resnet', weights='{tmp_path / 'm.safetensors'}')")
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
