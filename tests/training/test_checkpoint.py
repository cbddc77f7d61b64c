"""What a checkpoint must bring back beyond the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_fabric.plugins import MixedPrecision
from torch import nn

from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.weights import read_tensors, write_tensors
from unimetric.training.checkpoint import restore, save


def _net() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A convolution laid out as a GPU wants it, and the fused optimiser that runs there."""
    torch.manual_seed(0)
    net = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net, torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.arange(4 * 36.0).view(1, 4, 6, 6).sin().contiguous(memory_format=torch.channels_last)).square().mean().backward()
    optimizer.step()


def test_moments_come_back_laid_out_as_their_weights(tmp_path: Path) -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    save(tmp_path / "a.safetensors", parts={"net": net}, optimizers={"optimizer": optimizer}, progress={"epoch": 1})
    other, its = _net()
    assert restore(tmp_path / "a.safetensors", parts={"net": other}, optimizers={"optimizer": its}) == {"epoch": 1}
    for weight in other.parameters():
        assert all(its.state[weight][key].stride() == weight.stride() for key in ("exp_avg", "exp_avg_sq"))
    for one, its_optimizer in ((net, optimizer), (other, its)):
        _step(one, its_optimizer)
    for mine, its_own in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its_own)


def test_whoever_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "a")
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, {})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.txt").stat().st_mode


def _half() -> MixedPrecision:
    """What Fabric makes of `16-mixed`. It offers that on no CPU, where its scaler works all the same."""
    return MixedPrecision("16-mixed", "cpu")


def test_the_scale_of_half_precision_comes_back(tmp_path: Path) -> None:
    net, optimizer = _net()
    precision = _half()
    for factor in (float("inf"), float("inf"), 1.0):  # two steps that overflow, each halves the scale, and one that counts
        optimizer.zero_grad()
        precision.backward(net(torch.ones(1, 4, 6, 6)).mean() * factor, None)
        precision.optimizer_step(optimizer)
    assert precision.state_dict()["scale"] == 2.0**14
    parts = {"parts": {"net": net}, "optimizers": {"optimizer": optimizer}}
    save(tmp_path / "a.safetensors", **parts, progress={}, precision=precision)
    other = _half()
    restore(tmp_path / "a.safetensors", **parts, precision=other)
    assert other.state_dict() == precision.state_dict()
    restore(tmp_path / "a.safetensors", **parts, precision=MixedPrecision("bf16-mixed", "cpu"))  # as on a CPU: it has no use for one


def test_a_checkpoint_without_a_scale_still_loads(tmp_path: Path) -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    parts = {"parts": {"net": net}, "optimizers": {"optimizer": optimizer}}
    save(tmp_path / "other.safetensors", **parts, progress={"epoch": 1}, precision=MixedPrecision("bf16-mixed", "cpu"))
    tensors, notes = read_tensors(tmp_path / "other.safetensors")
    write_tensors(tmp_path / "old.safetensors", tensors, {key: value for key, value in notes.items() if key != "scale"})
    for name in ("other", "old"):
        precision = _half()
        assert restore(tmp_path / f"{name}.safetensors", **parts, precision=precision) == {"epoch": 1}
        assert precision.state_dict() == _half().state_dict()


@pytest.mark.parametrize(
    "altered",
    [
        {"progress": []},
        {"progress": {"epoch": "1"}},
        {"progress": {"epoch": 1, "step": -1}},
        {"groups": "x"},
        {"numbers": [1]},
    ],
)
def test_altered_notes_are_named(altered: dict, tmp_path: Path) -> None:
    net, optimizer = _net()
    path = tmp_path / "a.safetensors"
    save(path, parts={"net": net}, optimizers={"optimizer": optimizer}, progress={"epoch": 1, "step": 0})
    tensors, notes = read_tensors(path)
    write_tensors(path, tensors, notes | altered)
    with pytest.raises(UnimetricError, match=r"a\.safetensors: does not fit the run any more"):
        restore(path, parts={"net": net}, optimizers={"optimizer": optimizer})
