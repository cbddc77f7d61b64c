from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unimetric.config import RunConfig


def _gallery(path: Path, *, seed: int, shift: float, points: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.arange(points) % 6
    embeddings = np.eye(16)[labels] + 0.3 * rng.standard_normal((points, 16))
    thumbnails = []
    for number in range(points):
        out = io.BytesIO()
        Image.new("RGB", (24, 24), (40 * int(labels[number]), 90, number % 256)).save(out, "JPEG")
        thumbnails.append(out.getvalue())
    similarity = embeddings[:3] @ embeddings.T
    order = np.argsort(-similarity, axis=1)[:, 1:5]
    np.savez(
        path,
        embeddings=embeddings.astype(np.float16),
        labels=labels,
        names=np.array([f"class </script><!--<script> {label}" for label in labels]),
        source=np.array(["cub200"]),
        shift=np.float64(shift),
        queries=np.arange(3),
        neighbours=order,
        scores=np.take_along_axis(similarity, order, 1).astype(np.float32),
        class_names=np.array([f"class {label}" for label in range(6)]),
        class_recall=np.linspace(0.25, 1, 6, dtype=np.float32),
        class_queries=np.full(6, points // 6),
        class_confused=np.array(["class 5"] * 5 + [""]),
        spectrum=np.linalg.svd(embeddings, compute_uv=False).astype(np.float32),
        thumbnails=np.frombuffer(b"".join(thumbnails), np.uint8),
        ends=np.cumsum([len(each) for each in thumbnails]),
    )


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., Path]:
    """Write the folders of a study that never ran."""

    def write(count: int = 8, *, epochs: int = 4, pictures: bool = True, points: int = 24) -> Path:
        place = tmp_path / "runs"
        labels = {}
        base = RunConfig(
            dataset="cub200",
            backbone="timm(name='resnet50.tv_in1k', pretrained=True, frozen_batchnorm=True, train_affine=True)",
            head="linear(dim=128)",
            sampler="samples_per_class(n=2, with_replacement=True)",
            metrics=("recall(k=1)", "spectral_decay"),
            epochs=epochs,
        )
        for number in range(count):
            method, seed = divmod(number, 2)
            loss, miner = [("margin(beta=1.2)", "distance_weighted"), ("multi_similarity", ""), ("arcface", "")][method % 3]
            config = replace(base, loss=loss, miner=miner, seed=seed, batch_size=112 + method // 3)
            folder = place / config.run_id
            folder.mkdir(parents=True)
            labels[config.run_id] = {"method": f"{loss} <{method}>", "seed": str(seed)}
            recall = 0.5 + 0.01 * method + 0.002 * seed
            lines = [
                {"epoch": epoch, "loss": 1 / (1 + epoch), "test/recall(k=1)": recall * epoch / epochs, "test/spectral_decay": 1 - recall}
                for epoch in range(epochs + 1)
            ]
            (folder / "config.toml").write_text(config.dump())
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "done").write_text(json.dumps(lines[-1] | {"chosen_on": "test"}))
            (folder / "environment.json").write_text(json.dumps({"torch": "2.11", "device": "cpu", "run_id": config.run_id}))
            if pictures:
                _gallery(folder / "gallery.npz", seed=number, shift=float("nan"), points=points)
        (place / "study.json").write_text(json.dumps(labels))
        return place

    return write
