"""A tiny dataset of real letters, and settings that train on it in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unimetric import pack
from unimetric.config import RunConfig, load
from unimetric.spec import create


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Armenian letters: six classes to train on, six to test on, as a pack."""
    table = create("datasets", "glyphs(blocks='armenian')")
    classes = np.unique(table.labels)
    chosen = np.concatenate([np.unique(table.labels[table.train])[:6], np.unique(table.labels[~table.train])[:6]])
    assert len(classes) > len(chosen)
    path = tmp_path_factory.mktemp("letters") / "letters.pack"
    pack.write(path, table.take(np.isin(table.labels, chosen)), short_side=None, encoding="raw")
    return path


@pytest.fixture
def config(letters: Path) -> RunConfig:
    return load(
        dataset=f"pack(path='{letters}')",
        transform="glyphs(size=32)",
        backbone="small(channels=16)",
        head="linear(dim=8)",
        batch_size=12,
        optimizer="adam(lr=1e-3)",
        epochs=3,
        logger="none",
        device="cpu",
    )
