"""ONNX files: the same embeddings as in torch, for any number and size of images.

`UNIMETRIC_FULL=1` converts the networks of the papers instead of small ones.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.images.recipe import Recipe
from unimetric.runs.exported import Exportable
from unimetric.runs.model import Model
from unimetric.spec import create

onnx_library = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
load_model_from_string = onnx_library.load_model_from_string
create("formats", "onnx")
onnx = sys.modules["unimetric.formats.onnx"]  # the attribute of the package is the class

#: Backbone, adapter, head and size of the crop.
SMALL = {
    "resnet, diva": ("test_resnet", "", "diva(dim=16)", 64),
    "vit, puma, crt": ("test_vit", "puma(rank=4)", "crt(dim=16, hidden=32, prototypes=4)", 160),
}
LARGE = {
    "resnet50": ("resnet50", "", "linear", 224),
    "vit": ("vit_small_patch16_224", "", "linear", 224),
    "dinov2, puma": ("vit_small_patch14_dinov2", "puma", "linear", 224),
    "resnet50, crt": ("resnet50", "", "crt(reduce=512)", 224),
    "resnet50, diva": ("resnet50", "", "diva", 224),
}
MODELS = LARGE if os.environ.get("UNIMETRIC_FULL") else SMALL


def build(name: str, *, interpolation: Any = "bilinear") -> Exportable:
    torch.manual_seed(0)
    network, adapter, head, size = MODELS[name]
    backbone = create("backbones", f"timm(name='{network}', image_size={size if network.endswith('dinov2') else 0})")
    if network == "test_vit":
        backbone.network.blocks = backbone.network.blocks[:1]
    if adapter:
        backbone = create("adapters", adapter, backbone=backbone)
    for weight in backbone.parameters():
        if not weight.any():  # what an adapter adds starts at zero
            torch.nn.init.normal_(weight, std=0.02)
    model = Model(backbone, create("heads", head, features=backbone.channels, seed=0))
    return Exportable(model.eval(), Recipe(size=size, resize=size * 8 // 7, interpolation=interpolation)).eval()


@pytest.fixture(scope="module")
def converted() -> Callable[[str], tuple[Exportable, bytes]]:
    """Convert each model once, because that takes seconds."""

    @functools.cache
    def convert(name: str) -> tuple[Exportable, bytes]:
        model = build(name, interpolation="bicubic" if "puma" in name else "bilinear")
        return model, onnx._convert(model).SerializeToString()

    return convert


def write(graph: bytes, path: Path, monkeypatch: pytest.MonkeyPatch, text: str = "onnx", **notes: Any) -> Any:
    rng = np.random.default_rng(0)
    images = (rng.integers(0, 256, (1, 50 + each, 70, 3), dtype=np.uint8) for each in range(8))
    monkeypatch.setattr(onnx, "_convert", lambda model: load_model_from_string(graph))
    create("formats", text).write(None, path, notes=notes, images=lambda: images, check=lambda run: {})
    return create("formats", "onnx").read(path)


def some_images(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_onnx_equals_torch_at_any_batch_and_size(name: str, converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = converted(name)
    run, _ = write(graph, tmp_path / "model.onnx", monkeypatch)
    worst = 0.0
    for count, height, width in ((1, 60, 50), (2, 333, 121), (7, 101, 257), (64, 37, 53)):
        images = some_images(count, height, width)
        found, expected = run(images), model.embed(images)
        assert found.dtype == np.float32 and found.shape == expected.shape
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        worst = max(worst, float(np.abs(found - expected).max()))
    print(f"{name}: largest difference {worst:.2e}")
    assert worst <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_close(name: str, converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = converted(name)
    _, notes = write(graph, tmp_path / "whole.onnx", monkeypatch, run_id="abc")
    assert notes == {"precision": "fp32", "run_id": "abc"}
    run, notes = write(graph, tmp_path / "half.onnx", monkeypatch, "onnx(precision='fp16')")
    assert notes == {"precision": "fp16"}
    images = some_images(3, 80, 90)
    assert 1e-6 < np.abs(run(images) - model.embed(images)).max() < 5e-3
    weights = onnx_library.load(tmp_path / "half.onnx").graph.initializer
    crop = MODELS[name][3]  # one coordinate per row of the crop, which stays in float32
    large = [each for each in weights if each.data_type == onnx_library.TensorProto.FLOAT and np.prod(each.dims) > crop]
    assert not large, "weights of the network are in half precision"


def test_int8_quantizes_the_network_and_not_the_crop(converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = converted(next(iter(MODELS)))
    run, _ = write(graph, tmp_path / "model.onnx", monkeypatch, "onnx(precision='int8', calibration=4)")
    kinds = [node.op_type for node in onnx_library.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("Conv") == sum(isinstance(each, torch.nn.Conv2d) for each in model.modules())
    assert kinds.count("QuantizeLinear") >= kinds.count("Conv")
    assert kinds[: kinds.index("QuantizeLinear")].count("MatMul") == 2, "the two products of the crop come before the first rounding"
    images = some_images(5, 80, 90)
    assert 0.9 < (run(images) * model.embed(images)).sum(1).min() < 1 - 1e-7


def test_file_has_no_path_and_no_code_of_this_machine(converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = converted(next(iter(MODELS)))[1]
    assert b".py" in graph
    write(graph, tmp_path / "model.onnx", monkeypatch)
    content = (tmp_path / "model.onnx").read_bytes()
    assert str(Path(torch.__file__).parents[1]).encode() not in content and b".py" not in content and b"forward" not in content


@pytest.mark.parametrize(("content", "problem"), [(None, "no such file"), (b"", "was not exported"), (b"nonsense" * 9, "unreadable")])
def test_read_rejects_other_files(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnimetricError, match=problem) as caught:
        create("formats", "onnx").read(path)
    assert str(path) in caught.value.message and "export" in caught.value.hint
