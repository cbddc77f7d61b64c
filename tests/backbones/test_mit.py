"""MiT against transformers' SegFormer, and against the paper's numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.spec import create

transformers = pytest.importorskip("transformers")

# Millions of parameters of the encoder (Xie et al. 2021, table 1a), depths and widths (their table 6).
PAPER = {"b0": (3.4, 8), "b1": (13.1, 8), "b2": (24.2, 16), "b3": (44.0, 28), "b4": (60.8, 41), "b5": (81.4, 52)}


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    network = transformers.SegformerForImageClassification(transformers.SegformerConfig(num_labels=5)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    for name, module in network.named_modules():  # the original's; transformers leaves torch's default
        if isinstance(module, nn.LayerNorm) and name.endswith(("layernorm_before", "layernorm_after", "layer_norm_1", "layer_norm_2")):
            module.eps = 1e-6
    for stage in network.segformer.stages:
        stage.layer_norm.eps = 1e-6
    return network


def original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's file under the names of the original release, whose keys and values are one matrix."""
    out: dict[str, Tensor] = {}
    names = {"layer_norm_1": "norm1", "layer_norm_2": "norm2", "attention.output.dense": "attn.proj", "attention.self.query": "attn.q"}
    names |= {"attention.self.key": "attn.kv", "attention.self.sr": "attn.sr", "attention.self.layer_norm": "attn.norm"}
    names |= {"mlp.dense1": "mlp.fc1", "mlp.dense2": "mlp.fc2"}
    for key, value in state.items():
        if ".value." in key or not key.startswith("segformer."):
            continue
        if ".key." in key:
            value = torch.cat([value, state[key.replace(".key.", ".value.")]])
        for old, new in names.items():
            key = key.replace(old, new)
        kind, stage, rest = key.removeprefix("segformer.encoder.").split(".", 2)
        prefix = {"patch_embeddings": "patch_embed", "block": "block", "layer_norm": "norm"}[kind]
        out[f"{prefix}{int(stage) + 1}.{rest.replace('layer_norm', 'norm')}"] = value
    return out | {"head.weight": torch.zeros(5, 256)}


@pytest.mark.parametrize("layout", ["hub", "original", "memory"])
def test_tokens_are_those_of_transformers(layout: str, reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reference.save_pretrained(tmp_path)
    if layout == "original":
        state = original(load_file(path))
        assert state["block1.0.attn.kv.weight"].shape == (64, 32)
        path = tmp_path / "mit_b0.pth"
        torch.save({"state_dict": state}, path)
    elif layout == "memory":
        save_file(reference.state_dict(), path)
    backbone = create("backbones", f"mit(name='b0', weights='{path}')").eval()
    images = torch.randn(2, 3, 75, 64)
    with torch.no_grad():
        ours, map_, logits = backbone(images), reference.segformer(images).last_hidden_state, reference(images).logits
        scores = reference.classifier(ours[:, 0])
    assert map_.shape == (2, 256, 3, 2)
    torch.testing.assert_close(ours[:, 1:], map_.flatten(2).transpose(1, 2))
    torch.testing.assert_close(scores, logits)


@pytest.mark.parametrize("name", PAPER)
def test_sizes_are_those_of_the_paper(name: str) -> None:
    millions, depth = PAPER[name]
    with torch.device("meta"):
        backbone = create("backbones", f"mit(name='{name}')").eval()
    assert sum(parameter.numel() for parameter in backbone.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert sum(len(stage.blocks) for stage in backbone.network.stages) == depth
    assert backbone.channels == (256 if name == "b0" else 512)


@pytest.mark.parametrize(("side", "maps"), [(227, [57, 29, 15, 8]), (224, [56, 28, 14, 7])])
def test_maps_are_as_wide_as_the_coded_residual_transform_needs(side: int, maps: list[int]) -> None:
    seen: list[int] = []
    with torch.device("meta"):
        backbone = create("backbones", "mit(name='b2')").eval()
        for stage in backbone.network.stages:
            stage.register_forward_hook(lambda *arguments: seen.append(arguments[2].shape[-1]))
        assert backbone(torch.empty(2, 3, side, side)).shape == (2, 1 + maps[-1] ** 2, 512)
    assert seen == maps


def test_normalisation_is_that_of_the_image_processor() -> None:
    processor = transformers.SegformerImageProcessor
    backbone = create("backbones", "mit(name='b0')")
    assert (list(backbone.mean), list(backbone.std)) == (list(processor.image_mean), list(processor.image_std))


def test_drop_path_is_random_in_training_only() -> None:
    torch.manual_seed(0)
    backbone, images = create("backbones", "mit(name='b0', drop_path=0.9)"), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert not torch.equal(backbone.train()(images), backbone(images))
        assert torch.equal(backbone.eval()(images), backbone(images))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnimetricError, match=r"`name` must be one of `b0`, .*, got 'b9'"):
        create("backbones", "mit(name='b9')")
    with pytest.raises(UnimetricError, match="only one of `pretrained` and `weights`"):
        create("backbones", "mit(pretrained=True, weights='a.pth')")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(UnimetricError, match=r"needs the package transformers\n\nhint: pip install 'unimetric\[mit\]'"):
        create("backbones", "mit")
