"""Weights: files that a thread writes while a run continues, and models that are loaded without drawing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import changed
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.runs import weights
from unimetric.runs.folder import open_run
from unimetric.runs.model import build_model
from unimetric.runs.weights import FINGERPRINT, TensorWriter, Undrawn, read_tensors, write_tensors
from unimetric.spec import trusting
from unimetric.training.build import check_fit
from unimetric.training.loop import train


def test_writer_writes_the_values_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, save = threading.Event(), weights.save_file

    def save_later(*arguments: Any) -> None:
        assert changed.wait(60)
        save(*arguments)

    monkeypatch.setattr(weights, "save_file", save_later)
    kernel = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    with TensorWriter() as writer:
        writer.write(tmp_path / "a.safetensors", {"kernel": kernel, "same": kernel}, {"epoch": 1})
        kernel.zero_()
        assert not (tmp_path / "a.safetensors").exists()
        changed.set()
    tensors, notes = read_tensors(tmp_path / "a.safetensors")
    assert notes == {"epoch": 1}
    assert all(torch.equal(tensors[key], torch.arange(24.0).view(1, 2, 3, 4)) for key in ("kernel", "same"))


def test_writer_raises_the_error_of_its_thread(tmp_path: Path, small_disk: Callable[[], AbstractContextManager[None]]) -> None:
    large = {"a": torch.zeros(10_000)}
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    says = r"a\.safetensors: cannot be written: File too large\n\nhint: free some space"
    with small_disk(), pytest.raises(UnimetricError, match=says), TensorWriter() as writer:
        writer.write(tmp_path / "a.safetensors", large, {})
    with small_disk(), pytest.raises(ValueError, match="of the run"), TensorWriter() as writer:
        writer.write(tmp_path / "a.safetensors", large, {})
        raise ValueError("error of the run")
    assert torch.equal(read_tensors(tmp_path / "a.safetensors")[0]["a"], torch.ones(1))


def test_best_weights_are_complete_before_a_checkpoint(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = weights._write_copies

    def write_and_record(path: Path, *arguments: Any) -> None:
        if path.name == "model.safetensors":
            threading.Event().wait(1)
        write(path, *arguments)
        order.append(path.name)

    monkeypatch.setattr(weights, "_write_copies", write_and_record)
    train(replace(config, epochs=1, evaluate_every=1), tmp_path / "run", quiet=True)
    assert order[0] == "model.safetensors" and order[-1] == "checkpoint.safetensors"


class _Calls(TorchFunctionMode):
    """Functions of PyTorch that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


class _Net(nn.Module):
    """Parameters and buffers with random values, and a buffer that no state contains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token = nn.Linear(64, 64), nn.Parameter(torch.full((64,), 3.0))
        nn.init.normal_(self.layer.bias)
        trunc_normal_(self.token)  # timm's, as in its networks. PyTorch's own draws again in version 2.15, instead of bounding.
        nn.init.orthogonal_(self.layer.weight)
        self.register_buffer("noise", torch.zeros(64).normal_(), persistent=False)


def test_undrawn_leaves_parameters_and_draws_buffers() -> None:
    with _Calls() as calls, Undrawn():
        net = _Net()
    assert calls.seen & weights._DRAWS == {Tensor.normal_}  # of the buffer, and of a temporary tensor
    assert (net.token == 2).all()  # the bound of `trunc_normal_`
    assert net.noise.std() > 0.5
    state = _Net().state_dict()
    net.load_state_dict(state)
    assert all(torch.equal(net.state_dict()[key], state[key]) for key in state)


@pytest.mark.parametrize(("adapter", "drawn"), [("", False), ("vpt(length=2)", True)])
def test_open_run_draws_only_weights_that_are_not_stored(adapter: str, drawn: bool, config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, epochs=1, backbone="timm(name='test_vit', image_size=32)", adapter=adapter)
    train(config, tmp_path / "run", quiet=True)
    stored = read_tensors(tmp_path / "run" / "model.safetensors")[0]
    expected = build_model(config).state_dict() | stored
    expected.pop(FINGERPRINT, None)
    with _Calls() as calls:
        found = open_run(tmp_path / "run")[1].state_dict()
    assert (Tensor.erfinv_ in calls.seen) is drawn
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_check_draws_nothing(config: RunConfig) -> None:
    with _Calls() as calls:
        check_fit(replace(config, backbone="timm(name='test_vit', image_size=32)"), "settings")
    assert calls.seen and not calls.seen & weights._DRAWS - {Tensor.normal_, Tensor.uniform_}  # those also draw buffers


AFFINE = """
from torch import nn

def affine(backbone):
    for module in backbone.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, nn.BatchNorm2d))
    return backbone
"""


def test_statistics_that_an_adapter_trains_are_saved(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "norms.py").write_text(AFFINE)
    monkeypatch.syspath_prepend(tmp_path)
    with trusting("norms"):
        train(changed(config, adapter="norms.affine", epochs=1), tmp_path / "run", quiet=True)
        model = open_run(tmp_path / "run", epoch="last")[1]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(norm.running_mean is not None and norm.running_mean.any() for norm in norms)
