"""Recognize the layout of a weights file by its keys, and rename its tensors.

Every rule is `(pattern, replacement)` on a key. A layout is a list of rules, applied in order.
Nothing here depends on a file or a network.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]


@dataclass(frozen=True)
class Layout:
    """Naming scheme of a weights file.

    Args:
        name: Common name, for messages.
        sign: Pattern of a key that only this layout has.
        backbone: File of `backbones/` that reads it.
        rules: Rules from its keys to those of Unimetric.
    """

    name: str
    sign: str
    backbone: str
    rules: Rules = ()


def _next(prefix: str) -> Callable[[re.Match[str]], str]:
    """Return a replacement that adds 1 to a number, for layouts that count from 0, not 1."""
    return lambda match: prefix + str(int(match[1]) + 1)


_HUGGING_FACE_VIT: Rules = (
    (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.", ""),
    (r"^(?:encoder\.)?layers?\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r".attn.\1."),
    (r"\.attention\.(q|k|v)_proj\.", r".attn.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.(?:intermediate\.dense|mlp\.weights_in)\.", ".mlp.fc1."),
    (r"\.(?:output\.dense|mlp\.weights_out)\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)
_HUGGING_FACE_CLIP: Rules = (
    (r"^vision_model\.", "visual."),
    (r"^visual\.embeddings\.class_embedding$", "cls_token"),
    (r"^visual\.embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^visual\.pre_layrnorm\.", "norm_pre."),
    (r"^visual\.post_layernorm\.", "norm."),
    (r"^visual\.encoder\.layers\.", "blocks."),
    (r"^(blocks\.\d+)\.self_attn\.(q|k|v)_proj\.", r"\1.attn.\2."),
    (r"^(blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(blocks\.\d+)\.layer_norm", r"\1.norm"),
)
_OPENAI_CLIP: Rules = (
    (r"^visual\.class_embedding$", "cls_token"),
    (r"^visual\.positional_embedding$", "pos_embed"),
    (r"^visual\.conv1\.", "patch_embed.proj."),
    (r"^visual\.ln_pre\.", "norm_pre."),
    (r"^visual\.ln_post\.", "norm."),
    (r"^visual\.transformer\.resblocks\.", "blocks."),
    (r"^(blocks\.\d+)\.attn\.in_proj_", r"\1.attn.qkv."),
    (r"^(blocks\.\d+)\.attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(blocks\.\d+)\.ln_", r"\1.norm"),
    (r"^(blocks\.\d+)\.mlp\.c_fc\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.mlp\.c_proj\.", r"\1.mlp.fc2."),
)
_TORCHVISION_VIT: Rules = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
)
_DINOV2: Rules = (  # timm's names except for these; training in chunks writes `blocks.<chunk>.<block>.`
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
_HUGGING_FACE_RESNET: Rules = (
    (r"^resnet\.", ""),
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (r"^encoder\.stages\.(\d+)\.layers", _next("layer")),
    (r"\.layer\.(\d+)\.convolution", _next(".conv")),
    (r"\.layer\.(\d+)\.normalization", _next(".bn")),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
)
_SEGFORMER: Rules = (  # to the names on the Hugging Face hub
    (r"^patch_embed(\d)\.", lambda match: f"encoder.patch_embeddings.{int(match[1]) - 1}."),
    (r"^block(\d)\.", lambda match: f"encoder.block.{int(match[1]) - 1}."),
    (r"^norm(\d)\.", lambda match: f"encoder.layer_norm.{int(match[1]) - 1}."),
    (r"^(encoder\.patch_embeddings\.\d)\.norm\.", r"\1.layer_norm."),
    (r"\.norm([12])\.", r".layer_norm_\1."),
    (r"\.attn\.q\.", ".attention.self.query."),
    (r"\.attn\.kv\.", ".attention.self.key_value."),
    (r"\.attn\.proj\.", ".attention.output.dense."),
    (r"\.attn\.sr\.", ".attention.self.sr."),
    (r"\.attn\.norm\.", ".attention.self.layer_norm."),
    (r"\.mlp\.fc", ".mlp.dense"),
)
_TRANSFORMERS_5: Rules = (  # from the names on the hub to those of transformers 5 in memory
    (r"^encoder\.patch_embeddings\.(\d)\.", r"stages.\1.patch_embeddings."),
    (r"^encoder\.block\.(\d)\.", r"stages.\1.blocks."),
    (r"^encoder\.layer_norm\.(\d)\.", r"stages.\1.layer_norm."),
    (r"\.layer_norm_1\.", ".layernorm_before."),
    (r"\.layer_norm_2\.", ".layernorm_after."),
    (r"\.attention\.self\.(q|k|v)(?:uery|ey|alue)\.", r".attention.\1_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.attention\.self\.sr\.", ".attention.sequence_reduction.sequence_reduction."),
    (r"\.attention\.self\.layer_norm\.", ".attention.sequence_reduction.layer_norm."),
    (r"\.mlp\.dense", ".mlp.fc"),
)
_CAFFE_INCEPTION: Rules = (
    (r"^inception_(\d[a-e])_", r"\1."),
    (r"_bn\.(\w+)$", r".norm.\1"),
    (r"^(?!.*\.norm\.\w+$)(.+)\.(weight|bias)$", r"\1.conv.\2"),
)

LAYOUTS = (
    Layout("SegFormer", r"^patch_embed1\.proj\.weight$", "mit", _SEGFORMER),
    Layout("Hugging Face SegFormer", r"^(segformer\.)?(encoder\.patch_embeddings\.0|stages\.0\.patch_embeddings)\.proj\.weight$", "mit"),
    Layout("torchvision GoogLeNet", r"^inception3a\.branch1\.conv\.weight$", "googlenet"),
    Layout("Caffe BN-Inception", r"^inception_3a_double_3x3_1\.weight$", "bn_inception", _CAFFE_INCEPTION),
    Layout("Hugging Face CLIP", r"^vision_model\.embeddings\.class_embedding$", "timm", _HUGGING_FACE_CLIP),
    Layout("OpenAI CLIP", r"^visual\.class_embedding$", "timm", _OPENAI_CLIP),
    Layout("torchvision ViT", r"^encoder\.layers\.encoder_layer_0\.ln_1\.weight$", "timm", _TORCHVISION_VIT),
    Layout("Hugging Face ResNet", r"^(resnet\.)?embedder\.embedder\.convolution\.weight$", "timm", _HUGGING_FACE_RESNET),
    Layout("Hugging Face ViT", r"^(\w+\.)?embeddings\.patch_embeddings\.projection\.weight$", "timm", _HUGGING_FACE_VIT),
    Layout("DINOv2", r"^mask_token$", "timm", _DINOV2),
    Layout("torchvision MobileNet or EfficientNet", r"^features\.0\.1\.running_mean$", "timm"),
    Layout("torchvision ResNet", r"^layer1\.0\.conv1\.weight$", "timm"),
    Layout("timm", r"", "timm"),  # the default
)


def recognize(state: State) -> Layout:
    """Return the layout of a state dict, recognized by its keys.

    >>> recognize({"patch_embed1.proj.weight": torch.zeros(1)}).name
    'SegFormer'
    """
    return next(layout for layout in LAYOUTS if any(re.search(layout.sign, key) for key in state))


def rename(state: State, rules: Rules) -> State:
    """Apply every rule to every key, in order.

    >>> list(rename({"a.0.weight": torch.zeros(1)}, ((r"^a\\.(\\d)", r"b\\1"),)))
    ['b0.weight']
    """

    def rename_key(key: str) -> str:
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        return key

    return {rename_key(key): value for key, value in state.items()}


def to_timm(state: State, own: State) -> State:
    """Rename weights of any layout to the names of timm.

    Args:
        state: Weights of a network that timm has.
        own: State dict of the network, which defines the required names.
    """
    layout = recognize(state)
    if layout.name == "torchvision MobileNet or EfficientNet":
        return _by_order(state, own)
    state = rename(state, layout.rules)
    for key in [key for key in state if ".attn.q." in key]:  # timm has one matrix for all three
        parts = [key.replace(".attn.q.", f".attn.{letter}.") for letter in "qkv"]
        if all(part in state for part in parts):  # otherwise `fill` reports them as missing
            state[key.replace(".attn.q.", ".attn.qkv.")] = torch.cat([state.pop(part) for part in parts])
    if layout.name.endswith("CLIP") and "pos_embed" in state:
        state["cls_token"], state["pos_embed"] = state["cls_token"].view(1, 1, -1), state["pos_embed"][None]
    if state.keys() >= {"register_tokens", "pos_embed", "cls_token"}:
        # timm adds position embeddings to patches only, so that of the class token is added to the token.
        positions = state["pos_embed"]
        state |= {
            "reg_token": state.pop("register_tokens"),
            "pos_embed": positions[:, 1:],
            "cls_token": state["cls_token"] + positions[:, :1],
        }
    return state


def _by_order(state: State, own: State) -> State:
    """Rename layers by their order.

    torchvision numbers layers and timm names them, but both list them in the order of the forward
    pass.
    """
    features = [key for key in state if key.startswith("features.") and not key.endswith("num_batches_tracked")]
    given = [state[key] for key in sorted(features, key=_layer_order)]
    if "conv_head.bias" in own and "classifier.0.bias" in state:  # MobileNetV3: the layer after the pooling, a convolution in timm
        given += [state["classifier.0.weight"][..., None, None], state["classifier.0.bias"]]
    wanted = [key for key in own if not key.endswith("num_batches_tracked")]
    if len(wanted) != len(given):
        return state
    return dict(zip(wanted, given, strict=True))


def _layer_order(key: str) -> list[tuple[int, str]]:
    """Return a sort key that restores the order of a module.

    A .safetensors file is sorted alphabetically, with layer 10 before layer 2.
    """
    leaves = ("weight", "bias", "running_mean", "running_var")
    order: list[tuple[int, str]] = []
    for word in key.split("."):
        if word.isdigit():
            order.append((int(word), ""))
        elif word in leaves:
            order.append((leaves.index(word), ""))
        else:
            order.append((0, word))
    return order


def torchvision_eps(state: State, name: str) -> float | None:
    """Return the BatchNorm epsilon of torchvision if it differs from that of timm, else None.

    The weights do not contain it.
    """
    other = ("mobilenetv3", "efficientnet_b5", "efficientnet_b6", "efficientnet_b7", "efficientnetv2")
    if name.startswith(other) and recognize(state).name == "torchvision MobileNet or EfficientNet":
        return 1e-3
    return None


def to_segformer(state: State, own: State) -> State:
    """Rename the SegFormer encoder to the names of the installed transformers.

    Reads the original layout and that of Hugging Face.
    """
    state = rename(state, ((r"^segformer\.", ""), *recognize(state).rules))
    for key in [key for key in state if ".key_value." in key]:
        state[key.replace("key_value", "key")], state[key.replace("key_value", "value")] = state.pop(key).chunk(2)
    return rename(state, _TRANSFORMERS_5) if "stages.0.layer_norm.weight" in own else state


def to_inception(state: State) -> State:
    """Rename BN-Inception as converted from Caffe.

    The oldest conversions store the vectors of BatchNorm as rows.
    """
    state = rename(state, recognize(state).rules)
    return {key: value.flatten() if ".norm." in key and value.dim() == 2 else value for key, value in state.items()}
