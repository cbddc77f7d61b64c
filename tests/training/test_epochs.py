"""More epochs in the folder of a finished run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import changed, read_log

from unimetric.analysis.adapt import adapt
from unimetric.analysis.calibrate import calibrate
from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.gallery import write_gallery
from unimetric.config import RunConfig, load
from unimetric.errors import UnimetricError
from unimetric.training.loop import train

TIMES = ("seconds", "pictures_per_second", "peak_memory_gib")


def lines(folder: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read_log(folder)]


def same(a: Path, b: Path, name: str) -> bool:
    first, second = load_file(a / name), load_file(b / name)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("schedule", ["constant", "step(every=2)"])
def test_raised_epochs_end_as_the_long_run(config: RunConfig, tmp_path: Path, schedule: str) -> None:
    config = changed(config, schedule=schedule)
    long = changed(config, epochs=5)
    expected = train(long, tmp_path / "long", quiet=True)
    train(config, tmp_path / "run", quiet=True)
    found = train(long, tmp_path / "run", quiet=True)
    assert {key: value for key, value in found.items() if key not in TIMES} == {k: v for k, v in expected.items() if k not in TIMES}
    assert lines(tmp_path / "run") == lines(tmp_path / "long")
    assert all(same(tmp_path / "run", tmp_path / "long", name) for name in ("checkpoint.safetensors", "model.safetensors"))
    assert load(tmp_path / "run" / "config.toml") == long
    assert train(long, tmp_path / "run", quiet=True) == found
    assert evaluate(tmp_path / "run") == evaluate(tmp_path / "long")
    with pytest.raises(UnimetricError, match="`epochs = 5`, which cannot become 3: its epochs can only be raised"):
        train(config, tmp_path / "run", quiet=True)


def test_results_of_earlier_weights_are_removed(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, epochs=1, split="standard(validation=0.3)")
    train(config, tmp_path / "run", quiet=True)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    calibrate(tmp_path / "run", fpr=0.1, draws=10)
    write_gallery(tmp_path / "run")
    adapt(tmp_path / "run", shots=3, episodes=2, iterations=1, looks=0)
    more = {path.name for path in (tmp_path / "run").iterdir()}
    assert more - before == {"calibration.json", "calibration.png", "gallery.npz", "adapt_3_shots.json"}
    train(config, tmp_path / "run", quiet=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == more
    train(changed(config, epochs=2), tmp_path / "run", quiet=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == before


def test_schedule_that_depends_on_epochs_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, schedule="cosine", epochs=1)
    train(config, tmp_path / "run", quiet=True)
    done = (tmp_path / "run" / "done").read_bytes()
    with pytest.raises(UnimetricError, match=r"the schedule `cosine` depends on their number\. Its factor after") as refused:
        train(changed(config, epochs=2), tmp_path / "run", quiet=True)
    assert "another --out" in refused.value.hint
    assert (tmp_path / "run" / "done").read_bytes() == done


@pytest.mark.parametrize("killed", [False, True])
def test_last_evaluation_that_a_long_run_lacks_is_refused(config: RunConfig, tmp_path: Path, killed: bool) -> None:
    config = changed(config, epochs=1, evaluate_every=2)
    train(config, tmp_path / "run", quiet=True)
    if killed:  # after the last checkpoint
        (tmp_path / "run" / "done").unlink()
    with pytest.raises(UnimetricError, match="epoch 1 was evaluated because it was the last"):
        train(changed(config, epochs=2), tmp_path / "run", quiet=True)


KILLED = """
import os, signal, sys
from safetensors.torch import save_file
import unimetric.runs.weights as weights
from unimetric.config import load
from unimetric.training.loop import train

def save(tensors, path, notes):
    save_file(tensors, path, notes)
    if "checkpoint" in path.name:
        os.kill(os.getpid(), signal.SIGKILL)

weights.save_file = save
train(load(sys.argv[1]), sys.argv[2], quiet=True)
"""


def test_temporary_files_of_a_killed_run_are_removed(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(changed(config, epochs=1).dump())
    folder = tmp_path / "run"
    words = [sys.executable, "-c", KILLED, str(tmp_path / "settings.toml"), str(folder)]
    assert subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == -signal.SIGKILL
    assert [name for name in os.listdir(folder) if name.startswith(".checkpoint.safetensors.")]
    train(changed(config, epochs=1), folder, quiet=True)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
