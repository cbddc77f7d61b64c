"""Files of tensors that a thread writes while a run continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.runs import weights
from unimetric.runs.weights import TensorWriter, read_tensors, write_tensors
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
    with small_disk(), pytest.raises(UnimetricError, match="cannot be written"), TensorWriter() as writer:
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
