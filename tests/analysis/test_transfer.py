"""Transfer: warnings about images that a run was trained on, and reads of datasets."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from unimetric.analysis.transfer import transfer
from unimetric.config import RunConfig
from unimetric.images import packing
from unimetric.images.pack import Pack
from unimetric.runs import rows
from unimetric.training.loop import train


def test_transfer_warns_of_training_images(config: RunConfig, letters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    train(replace(config, epochs=1), run, quiet=True)
    table = Pack.open(letters).table
    packing.write(tmp_path / "swapped.pack", replace(table, train=~table.train), short_side=None, encoding=Pack.open(letters).encoding)

    def warnings_of(dataset: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "unimetric"):
            transfer([run], [dataset])
        return caplog.text

    assert "was trained on" not in warnings_of(config.dataset)  # its own dataset, whose test classes are new to it
    swapped = f"pack(path='{tmp_path / 'swapped.pack'}')"
    assert f"{run}: was trained on {table.train.sum()} of the {table.train.sum()} test images of `{swapped}`" in warnings_of(swapped)
    (run / "data.json").unlink()  # as in a folder of an earlier version
    assert "was trained on" not in warnings_of(swapped)


def test_transfer_reads_each_dataset_once(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(replace(config, epochs=1), tmp_path / "run", quiet=True)
    create, read = rows.create, []

    def count_datasets(kind: str, text: str) -> object:
        read.append((kind, text))
        return create(kind, text)

    monkeypatch.setattr(rows, "create", count_datasets)
    transfer([tmp_path / "run"], [config.dataset])
    assert read == [("datasets", config.dataset)]
