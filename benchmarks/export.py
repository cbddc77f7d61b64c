"""Throughput of exported models in onnxruntime, next to torch, on the CPU.

    python benchmarks/export.py [--networks resnet50 vit_small_patch16_224] [--batch 8] [--turns 5] [--size 224]

Each network with random weights embeds the same uint8 images: in torch, in torch with channels last, and in onnxruntime
in fp32, fp16 and int8. All use the same number of threads. They take turns, so that a slow moment of the machine affects
all of them. The table has the images per second of the median and of the best turn, and the largest difference of a
coordinate from torch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from _machine import Stolen, processor

from unimetric.images.recipe import Recipe
from unimetric.runs.exported import Exportable
from unimetric.runs.model import Model
from unimetric.spec import create

Embed = Callable[[np.ndarray], np.ndarray]


def build(network: str, size: int) -> Exportable:
    torch.manual_seed(0)
    backbone = create("backbones", f"timm(name='{network}')")
    model = Model(backbone, create("heads", "linear(dim=128)", features=backbone.channels))
    return Exportable(model.eval(), Recipe(size=size, resize=size * 8 // 7)).eval()


def variants(network: str, size: int, images: np.ndarray) -> dict[str, Embed]:
    """Return the functions to compare, by name."""

    def samples() -> Iterator[np.ndarray]:
        return (image[None] for image in images)

    model = build(network, size)
    found: dict[str, Embed] = {"torch": model.embed}
    found["torch, channels last"] = build(network, size).to(memory_format=torch.channels_last).embed
    for precision in ("fp32", "fp16", "int8"):
        form = create("formats", f"onnx(precision='{precision}', calibration=8)")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            form.write(model, path, notes={}, images=samples, check=lambda run: {})
            found[f"onnxruntime, {precision}"] = form.read(path)[0]
    return found


def compare(network: str, *, size: int, batch: int, turns: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (batch, size * 8 // 7, size * 10 // 7, 3), dtype=np.uint8)
    functions = variants(network, size, images)
    expected = functions["torch"](images)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 1):  # the first turn is a warm-up
        for name, function in functions.items():
            start = time.perf_counter()
            function(images)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    print(f"\n{network}, {size} pixels, batch {batch}, {torch.get_num_threads()} threads, {turns} turns")
    print(f"{'':<24} {'median':>8} {'best':>8}  images/s   largest difference")
    for name, times in seconds.items():
        difference = np.abs(functions[name](images) - expected).max()
        print(f"{name:<24} {batch / statistics.median(times):>8.2f} {batch / min(times):>8.2f}             {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "vit_small_patch16_224"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    stolen = Stolen()
    print(processor())
    for network in options.networks:
        compare(network, size=options.size, batch=options.batch, turns=options.turns)
    print(stolen)


if __name__ == "__main__":
    main()
