"""What a run leaves for a report."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.gallery import write_gallery, write_missing_galleries
from unimetric.config import RunConfig, from_settings
from unimetric.geometry import poincare, to_ball
from unimetric.report import report
from unimetric.report.folders import read_runs
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all
from unimetric.runs.folder import open_run
from unimetric.runs.rows import read_table
from unimetric.splits.ood import distance_of
from unimetric.training.loop import train


def test_the_shift_of_a_run_is_what_its_file_of_splits_says(tmp_path: Path) -> None:
    ours = {"history": [{"key": "0", "distance": 1.5}, {"key": "2", "distance": 2.5}], "splits": {"1": {"key": "2", "distance": 2.5}}}
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    (tmp_path / "silent.json").write_text(json.dumps({"1": {"train": []}}))
    assert distance_of(f"ood(path='{tmp_path}/ours.json', split=1)") == 2.5
    assert distance_of(f"ood(path='{tmp_path}/ours.json', key='0')") == 1.5
    assert math.isnan(distance_of(f"published(path='{tmp_path}/silent.json')"))
    assert math.isnan(distance_of("standard"))
    (tmp_path / "theirs.json").write_text(json.dumps({"4": {"fid": 8.6}}))
    assert distance_of(f"published(path='{tmp_path}/theirs.json', split=4)") == 8.6


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
        queries, found, scores = file["queries"], file["neighbours"], file["scores"]
    expected = distance[queries].sort(dim=1).values[:, : found.shape[1]]
    assert torch.allclose(distance[queries].gather(1, torch.from_numpy(found)), expected, atol=1e-5)
    assert np.allclose(-scores, expected, atol=1e-3)


def test_images_of_the_own_group_are_no_neighbors(config: RunConfig, tmp_path: Path) -> None:
    lines = ["path,label,camera"]
    for number in range(16):
        image = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{number // 4},{number // 2 % 2}")
    (tmp_path / "few.csv").write_text("\n".join(lines))
    few = {"dataset": f"csv(file='{tmp_path / 'few.csv'}', group_rule='group')", "batch_size": 4, "epochs": 1}
    train(from_settings(asdict(config) | few), tmp_path / "run", quiet=True)
    with np.load(write_gallery(tmp_path / "run")) as file:
        assert file["neighbours"].shape == file["scores"].shape == (8, 4)  # four of eight images are of another camera
        assert len(set(file["paths"])) == len(file["paths"]) and np.isfinite(file["scores"]).all()


def test_gallery_has_large_images_paths_and_classes(config: RunConfig, tmp_path: Path) -> None:
    train(from_settings(asdict(config) | {"epochs": 1}), tmp_path / "run", quiet=True)
    with np.load(write_gallery(tmp_path / "run", side=24, points=30)) as file:
        arrays = dict(file)
    ends = [0, *arrays["ends"].tolist()]
    data = arrays["thumbnails"].tobytes()
    sides = [max(Image.open(io.BytesIO(data[start:end])).size) for start, end in pairwise(ends)]
    shown = {*arrays["queries"].tolist(), *arrays["neighbours"].ravel().tolist()}
    assert sides == [24 if number in shown else 12 for number in range(len(sides))] and set(sides) == {24, 12}
    table, split = read_table(open_run(tmp_path / "run")[0])
    names = {path: table.class_names[label] for path, label in zip(table.paths, table.labels, strict=True)}
    assert [names[path] for path in arrays["paths"]] == arrays["names"].tolist()
    found: list[dict] = []
    evaluate(tmp_path / "run", per_class=found.extend)
    assert [row["class"] for row in found] == arrays["class_names"].tolist()
    assert np.allclose([row["recall"] for row in found], arrays["class_recall"])
    assert arrays["class_queries"].sum() == len(split.test)
    (record,) = read_runs([tmp_path / "run"])[0]
    assert record.gallery.keys() == arrays.keys()


def test_run_without_readable_weights_is_listed(config: RunConfig, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(from_settings(asdict(config) | {"epochs": 1, "seed": ord(name)}), tmp_path / "runs" / name, quiet=True)
    weights = tmp_path / "runs" / "a" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    failed = write_missing_galleries([tmp_path / "runs"])
    assert [folder.name for folder, _ in failed] == ["a"] and str(weights) in failed[0][1]
    assert (tmp_path / "runs" / "b" / "gallery.npz").exists()
    assert report([tmp_path / "runs"], tmp_path / "page.html", failed=failed) == failed
