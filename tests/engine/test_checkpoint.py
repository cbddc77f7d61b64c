"""What a checkpoint must bring back beyond the numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from unimetric.engine.checkpoint import restore, save, write_tensors, write_text


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
