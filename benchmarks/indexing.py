"""Images per second of `unimetric index`, relative to a bare loop of decoding and network.

    python benchmarks/indexing.py images/                                        # EfficientNet-Lite0 on two cores
    python benchmarks/indexing.py images/ --model "timm(name='resnet50')" --workers 16 --images 20000

The bare loop is a `DataLoader` with as many workers that decode by Pillow, resize and crop by torchvision, and the same network
in the same precision and batch. It keeps nothing. The index is a complete build: listing, digests, store, ledger and compaction.
Both alternate, on the same images. If the folder has fewer images than `--images`, they are repeated. On a shared machine, compare
the processor time, which is that of all processes of a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import Stolen, processor
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from unimetric.config import from_settings
from unimetric.datasets.files import walk
from unimetric.deploy.building import build
from unimetric.deploy.embedding import Embedder
from unimetric.deploy.export import write_model
from unimetric.deploy.index import Index
from unimetric.images.pack import count_cores
from unimetric.runs.device import peak_memory
from unimetric.runs.model import build_model


class Decoded:
    """Images as any tutorial reads them."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.transform = v2.Compose([v2.PILToTensor(), v2.Resize(256, antialias=True), v2.CenterCrop(224)])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> torch.Tensor:
        with Image.open(self.paths[row]) as image:
            return self.transform(image.convert("RGB"))


@torch.inference_mode()
def bare(embedder: Embedder, paths: list[str], workers: int) -> None:
    """Decode the images and run the network."""
    loader: Any = DataLoader(Decoded(paths), batch_size=embedder.batch, num_workers=workers, pin_memory=embedder.device.type == "cuda")
    for images in loader:
        images = images.to(embedder.device, non_blocking=True).float() / 255
        found = embedder.model((images - embedder.mean) / embedder.std)[0]
    found.cpu()


def clock(function: Callable[[], Any], images: int) -> dict[str, float]:
    """Return images per second, and milliseconds of processor time per image, workers included."""

    def processor_time() -> float:
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    begun, used = time.perf_counter(), processor_time()
    function()
    return {
        "images_per_second": images / (time.perf_counter() - begun),
        "milliseconds_per_image": 1000 * (processor_time() - used) / images,
    }


def copies(source: Path, count: int, folder: Path) -> list[str]:
    """Link some images of a folder into another one, and repeat them if there are too few."""
    known = [os.path.abspath(each.path) for each in walk(source)]
    if not known:
        raise SystemExit(f"{source}: has no images")
    paths = []
    for number in range(count):
        original = known[number % len(known)]
        path = folder / f"{number // 1000:05d}" / f"{number:08d}{Path(original).suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(original, path)
        paths.append(str(path))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of images")
    parser.add_argument("--model", default="efficientnet_lite", help="backbone spec string")
    parser.add_argument("--images", type=int, default=1024, help="images per turn")
    parser.add_argument("--workers", type=int, default=min(16, count_cores()), help="processes that read images")
    parser.add_argument("--turns", type=int, default=3, help="turns of both")
    parser.add_argument("--store", default="flat", help="store spec string")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    stolen = Stolen()
    config = from_settings({"backbone": options.model, "head": "identity"})
    model = build_model(config)
    folder = Path(tempfile.mkdtemp(prefix="indexing"))
    try:
        paths = copies(options.folder, options.images, folder / "images")
        write_model(config, model, folder / "model", "benchmark")
        embedder = Embedder(config, model)
        bare(embedder, paths[: 2 * embedder.batch], options.workers)
        turns: dict[str, list[dict[str, float]]] = {"bare": [], "index": []}
        for turn in range(options.turns):
            where = {"store": options.store, "workers": options.workers}
            turns["bare"].append(clock(lambda: bare(embedder, paths, options.workers), len(paths)))
            turns["index"].append(clock(lambda: build(folder / "model", folder / "images", folder / f"{turn}.index", **where), len(paths)))  # noqa: B023
            print(json.dumps({name: {key: round(value, 2) for key, value in each[-1].items()} for name, each in turns.items()}), flush=True)
        with Index.open(folder / "0.index") as index:
            assert len(index) == len(paths)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    median = {name: {key: round(statistics.median(turn[key] for turn in each), 2) for key in each[0]} for name, each in turns.items()}
    ratios = [after["images_per_second"] / before["images_per_second"] for before, after in zip(*turns.values(), strict=True)]
    times = [before["milliseconds_per_image"] / after["milliseconds_per_image"] for before, after in zip(*turns.values(), strict=True)]
    found = {
        "model": options.model,
        "images": options.images,
        "workers": options.workers,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        **median,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "processor_time_ratio": round(statistics.median(times), 4),
        "peak_memory_gib": peak_memory(torch.device("cpu")),
        "stolen": str(stolen),
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
