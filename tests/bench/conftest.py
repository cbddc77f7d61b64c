from __future__ import annotations

from pathlib import Path

import pytest

#: A study of eight runs that learns next to nothing, fast.
GRID = """
dataset = "glyphs(blocks='shapes')"
transform = "glyphs"
backbone = "small(channels=8)"
head = "linear(dim=8)"
optimizer = "adam(lr=1e-3)"
metrics = ["recall(k=1)", "spectral_decay"]
epochs = 1
batch_size = 16
logger = "none"
device = "cpu"
workers = 0
seed = [0, 1]
loss = ["margin", "multi_similarity", "triplet", "contrastive"]
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "tiny.toml"
    path.write_text(GRID)
    return path
