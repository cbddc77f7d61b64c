"""Stages around training, next to their bare work: a report of many runs, updates of an index, few-shot adaptation.

    python benchmarks/stages.py
    python benchmarks/stages.py --only update --images 20000

`report` writes the page of copies of one run; bare is parsing the files of all runs. `update` indexes a folder again, first without a
change and then with one new image in a hundred; bare is listing the files with their sizes and times, and embedding the new ones with timm
and torchvision: building the network, loading its weights, reading and cropping the images, and one pass. `adapt` tunes the last layer on
five images per class in two episodes; bare is cropping as many images, one pass of them through the network, and as many steps of loss and
Adam on features in memory. Stage and bare work alternate; the times are medians, of processor time and of wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from _machine import Stolen, processor
from indexing import synthesize
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import transforms

from unimetric.analysis.adapt import adapt
from unimetric.config import from_settings, load
from unimetric.deploy.building import build
from unimetric.deploy.export import write_model
from unimetric.images.loading import View, open_pictures
from unimetric.report.page import report
from unimetric.runs.folder import open_run
from unimetric.runs.model import build_model
from unimetric.runs.rows import read_table
from unimetric.spec import create
from unimetric.training.loop import train

Work = Callable[[], object]


def compare(label: str, stage: Work, bare: Work, turns: int, before: Work = lambda: None) -> None:
    """Let a stage and its bare work take turns, and print both. `before` prepares a turn and is not timed."""
    times: dict[str, list[tuple[float, float]]] = {"stage": [], "bare": []}
    for _ in range(turns):
        before()
        for name, work in (("stage", stage), ("bare", bare)):
            wall, used = time.perf_counter(), time.process_time()
            work()
            times[name].append((time.process_time() - used, time.perf_counter() - wall))
    (used, wall), (bare_used, bare_wall) = ([statistics.median(each) for each in zip(*values, strict=True)] for values in times.values())
    print(
        f"{label}\n  processor {used:8.3f} s, bare {bare_used:8.3f} s, ratio {used / bare_used:6.2f}"
        f"   wall {wall:8.3f} s, bare {bare_wall:8.3f} s, ratio {wall / bare_wall:6.2f}",
        flush=True,
    )


def time_report(run: Path, folder: Path, options: argparse.Namespace) -> None:
    runs = folder / "runs"
    for number in range(options.runs):
        shutil.copytree(run, runs / f"{number:04d}", ignore=shutil.ignore_patterns("*.safetensors", "*.pt"))
        settings = runs / f"{number:04d}" / "config.toml"
        settings.write_text(
            settings.read_text().replace("seed = 0", f"seed = {number % 5}").replace("beta=1.2", f"beta={1 + number // 5 / 500}")
        )

    def parse() -> None:
        for file in runs.glob("*/*"):
            if file.suffix == ".toml":
                tomllib.loads(file.read_text())
            elif file.suffix == ".json":
                json.loads(file.read_text())
            elif file.suffix == ".jsonl":
                [json.loads(line) for line in file.read_text().splitlines()]

    compare(f"report of {options.runs} runs", lambda: report([runs], folder / "report.html"), parse, options.turns)


def time_update(run: Path, folder: Path, options: argparse.Namespace) -> None:
    images, index = folder / "images", folder / "my.index"
    synthesize(options.images, images)
    config = from_settings({"backbone": "efficientnet_lite(pretrained=False)", "head": "identity"}, "benchmark")
    write_model(config, build_model(config), folder / "model", "benchmark")
    build(folder / "model", images, index)
    weights = folder / "lite0.safetensors"
    save_file(timm.create_model("tf_efficientnet_lite0", num_classes=0).state_dict(), weights)
    crop = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    latest = images / "new"

    def look() -> list[tuple[str, os.stat_result]]:
        return [(entry.path, entry.stat()) for place, _, _ in os.walk(images) for entry in os.scandir(place) if entry.is_file()]

    def update() -> None:
        build(folder / "model", images, index)

    compare(f"update of an index of {options.images} files, nothing new", update, look, options.turns)
    new = options.images // 100

    def grow() -> None:
        nonlocal latest
        latest = images / f"{latest.name} again"
        synthesize(new, latest)

    @torch.inference_mode()
    def embed() -> None:
        look()
        network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
        network.load_state_dict(load_file(weights))
        network(torch.stack([crop(Image.open(file).convert("RGB")) for file in latest.rglob("*.jpg")]))

    compare(f"update of an index of {options.images} files, {new} new", update, embed, options.turns, before=grow)


def time_adapt(run: Path, folder: Path, options: argparse.Namespace) -> None:
    shots, episodes, crops, steps, batch = 5, 2, 16, 1500, 112
    config, model = open_run(run)
    table, split = read_table(config)
    test = table.labels[split.test]
    view = View(create("transforms", config.transform), epoch=0)
    passed = len(test) + crops * shots * episodes * len(np.unique(test))
    loader = open_pictures(table, device=torch.device("cpu"), mean=model.mean, std=model.std)
    rows = np.resize(split.test, passed)
    features, labels = torch.randn(batch, model.backbone.channels), torch.arange(batch) // 2

    def bare() -> None:
        with torch.inference_mode():
            for images in loader.load((rows[first : first + 256], view) for first in range(0, passed, 256)):
                model.eval().backbone(images)
        head = nn.Linear(model.backbone.channels, model.dim)
        loss = create("losses", "margin(beta=1.2, learn_beta=False, or_count=True)", miner="distance_weighted")
        optimizer = torch.optim.Adam(head.parameters(), lr=1e-4)
        for _ in range(episodes * steps):
            value = loss(head(features), labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    label = f"few-shot adaptation, {len(test)} test images, {passed - len(test)} crops, {episodes * steps} steps"
    compare(label, lambda: adapt(run, shots=shots, episodes=episodes, looks=crops, iterations=steps, draw="random"), bare, options.turns)


def main() -> None:
    subjects = {"report": time_report, "update": time_update, "adapt": time_adapt}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=subjects, default=list(subjects))
    parser.add_argument("--runs", type=int, default=500, help="runs of the report")
    parser.add_argument("--images", type=int, default=10_000, help="files of the index")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    stolen = Stolen()
    print(processor(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        train(load("glyphs_margin", epochs=2), run, quiet=True)
        for name in options.only:
            subjects[name](run, Path(scratch), options)
    print(stolen)


if __name__ == "__main__":
    main()
