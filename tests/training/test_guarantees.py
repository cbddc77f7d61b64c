"""Settings outside the run id: the same result, or a line that says it may differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.conftest import changed, interrupt

from unimetric.config import RunConfig
from unimetric.images import packing
from unimetric.images.loading import Resident, Streamed, View
from unimetric.images.table import Table
from unimetric.kinds import EmbeddedSampler
from unimetric.spec import create
from unimetric.training.loop import train


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_and_resident_packs_train_the_same_weights(config: RunConfig, tmp_path: Path, workers: int) -> None:
    config = changed(config, epochs=2, transform="adv(size=24, resize=28)")
    train(changed(config, residence="host"), tmp_path / "host", quiet=True)
    train(changed(config, residence="stream", workers=workers), tmp_path / "stream", quiet=True)
    one, two = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("host", "stream"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def pack_of(sizes: list[tuple[int, int]], folder: Path) -> Table:
    rng = np.random.default_rng(0)
    paths = []
    for number, (height, width) in enumerate(sizes):
        paths.append(str(folder / f"{number}.png"))
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(paths[-1])
    table = Table(tuple(paths), np.zeros(len(paths)), ("a",), np.ones(len(paths), bool))
    return packing.write(folder / "sizes.pack", table, short_side=None, encoding="jpeg").table


def crops(table: Table, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"device": torch.device("cpu"), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    requests = [(np.array([3, 0, 2, 2]), view), (np.array([1, 2]), view)]
    loaders = Resident(table, where=torch.device("cpu"), **options), Streamed(table, workers=0, **options)
    return tuple(torch.cat(list(loader.load(iter(requests)))) for loader in loaders)  # type: ignore[return-value]


@pytest.mark.parametrize("epoch", [None, 3])
@pytest.mark.parametrize("transform", ["base(size=24, resize=28)", "adv(size=24, resize=28)"])
def test_crops_of_packed_images_are_bit_identical(tmp_path: Path, transform: str, epoch: int | None) -> None:
    table = pack_of([(40, 50), (33, 61), (52, 38), (45, 45)], tmp_path)
    one, two = crops(table, View(create("transforms", transform), seed=1, epoch=epoch))
    assert torch.equal(one, two)


def test_one_huge_image_does_not_pad_a_streamed_batch(tmp_path: Path) -> None:
    table = pack_of([(400, 500), *[(33, 61), (52, 38), (45, 45)] * 3], tmp_path)
    one, two = crops(table, View(create("transforms", "base(size=24, resize=28)")))
    assert torch.allclose(one, two, atol=0.02) and not torch.equal(one, two)


def test_other_execution_is_named_on_resume(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(config, epochs=2, evaluate_batch=32)
    interrupt(config, tmp_path / "same")
    train(changed(config, residence="stream", workers=0), tmp_path / "same")
    assert "may differ from an uninterrupted run" not in capsys.readouterr().out
    interrupt(config, tmp_path / "run")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        train(changed(config, evaluate_batch=16), tmp_path / "run")
    finally:
        torch.set_num_threads(before)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"resuming with {before + 1} threads (was: {before} threads), evaluate_batch 16 (was: evaluate_batch 32):" in shown
    assert "may differ from an uninterrupted run by rounding" in shown


def test_workers_of_selected_batches_are_named(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(config, epochs=2, sampler="distance_matching(big_batch=24, candidates=3)", residence="stream", workers=0)
    interrupt(config, tmp_path / "run", EmbeddedSampler)
    train(changed(config, residence="host"), tmp_path / "run")
    assert "may differ from an uninterrupted run" not in capsys.readouterr().out
    interrupt(config, tmp_path / "other", EmbeddedSampler)
    train(changed(config, workers=2), tmp_path / "other")
    shown = " ".join(capsys.readouterr().out.split())
    assert "resuming with batches requested by 2 workers (was: batches requested by 0 workers):" in shown


def test_batch_norm_and_mixup_on_two_ranks_are_named(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, epochs=1, evaluate_every=0, device="cpu:2", strategy="ddp", objective="mixup(stages=(0,))")
    (tmp_path / "settings.toml").write_text(config.dump())
    words = [sys.executable, "-m", "unimetric.cli", "train", str(tmp_path / "settings.toml"), "--out", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "BatchNorm layers normalize the slice of each of the 2 devices on its own" in shown
    assert "the objective blends the slice of each of the 2 devices on its own" in shown
