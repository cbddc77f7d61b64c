"""Evaluation of saved embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unimetric.analysis.evaluate import evaluate, evaluate_file
from unimetric.config import load
from unimetric.images import packing
from unimetric.spec import create

METRICS = ["recall(k=1)", "map_at_r", "harmonic", "per_source"]


@pytest.mark.parametrize("geometry", ["cosine", "euclidean"])
def test_saved_embeddings_repeat_the_values_of_the_run(geometry: str, tmp_path: Path) -> None:
    table = create("datasets", "glyphs(blocks=['armenian', 'georgian'])")
    grouped = replace(table, group=np.arange(len(table)) % 7, group_names=tuple("abcdefg"), group_rule="group")
    packing.write(tmp_path / "letters.pack", grouped, short_side=None, encoding="raw")
    config = load(
        dataset=f"pack(path='{tmp_path / 'letters.pack'}')",
        transform="glyphs(size=32)",
        backbone="small(channels=8)",
        geometry=geometry,
        device="cpu",
    )
    numbers = evaluate(config, metrics=METRICS, save=tmp_path / "saved.npz")
    assert numbers["per_source/armenian"] != numbers["per_source/georgian"]
    assert evaluate_file(tmp_path / "saved.npz", metrics=METRICS) == pytest.approx(numbers)
    other = evaluate(config, metrics=METRICS, group_rule="none")
    assert evaluate_file(tmp_path / "saved.npz", metrics=METRICS, group_rule="none") == pytest.approx(other) != pytest.approx(numbers)
