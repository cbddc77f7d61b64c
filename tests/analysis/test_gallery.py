"""What a run leaves for a report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from unimetric.analysis.gallery import _shift, write_gallery
from unimetric.config import RunConfig, from_settings
from unimetric.geometry import poincare, to_ball
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all
from unimetric.runs.folder import open_run
from unimetric.runs.rows import read_table
from unimetric.training.loop import train


def test_the_shift_of_a_run_is_what_its_file_of_splits_says(tmp_path: Path) -> None:
    ours = {"history": [{"key": "0", "distance": 1.5}, {"key": "2", "distance": 2.5}], "splits": {"1": {"key": "2", "distance": 2.5}}}
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    (tmp_path / "silent.json").write_text(json.dumps({"1": {"train": []}}))
    assert _shift(f"ood(path='{tmp_path}/ours.json', split=1)") == 2.5
    assert _shift(f"ood(path='{tmp_path}/ours.json', key='0')") == 1.5
    assert math.isnan(_shift(f"published(path='{tmp_path}/silent.json')"))
    assert math.isnan(_shift("standard"))
    (tmp_path / "theirs.json").write_text(json.dumps({"4": {"fid": 8.6}}))
    assert _shift(f"published(path='{tmp_path}/theirs.json', split=4)") == 8.6


def test_neighbours_are_those_that_the_run_is_measured_by(config: RunConfig, tmp_path: Path) -> None:
    """The page showed the neighbours by cosine of a run whose recall is of the ball."""
    inside = {"loss": "hyperbolic(curvature=0.5)", "head": "linear(dim=3)", "epochs": 1}
    train(from_settings(asdict(config) | inside), tmp_path / "run", quiet=True)
    settings, model = open_run(tmp_path / "run")
    table, split = read_table(settings)
    points = len(split.test)
    embeddings = embed_all(open_fabric(settings), settings, model, table.take(split.test))
    ball = to_ball(embeddings.double(), curvature=0.5, clip=2.3)
    distance = poincare(ball, ball, curvature=0.5).fill_diagonal_(torch.inf)
    with np.load(write_gallery(tmp_path / "run", queries=points, points=points)) as file:
        queries, found = file["queries"], file["neighbours"]
    expected = distance[queries].sort(dim=1).values[:, : found.shape[1]]
    assert torch.allclose(distance[queries].gather(1, torch.from_numpy(found)), expected, atol=1e-5)
