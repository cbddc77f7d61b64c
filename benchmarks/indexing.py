"""Images per second of `unimetric index`, relative to a bare loop of decoding and network.

    python benchmarks/indexing.py images/                                        # EfficientNet-Lite0 on two cores
    python benchmarks/indexing.py images/ --model "timm(name='resnet50')" --workers 16 --images 20000
    python benchmarks/indexing.py --images 20000 --ray --kill 2 --turns 1        # synthetic images, a tiny network, Ray

The bare loop is a `DataLoader` with as many workers that decode by Pillow, resize and crop by torchvision, and the same network
in the same precision and batch. It keeps nothing. The index is a complete build: listing, digests, store, ledger and compaction.
Both alternate, on the same images; the bare loop reads at most 20,000 of them. If the folder has fewer images than `--images`, they are
repeated. Without a folder, JPEG files of 48 x 48 pixels are made, and a tiny network embeds them.

With `--ray`, two more take their turns: a build on a local Ray cluster, which must equal that of one process bit for bit, and Ray Data
(`pip install 'ray[data]'`) with the bare loop's decoding and network in as many actors. `--kill` kills workers of that build.

On a shared machine, compare the processor time, which is that of all processes of a turn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from _machine import Stolen, processor
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from unimetric.config import RunConfig, from_settings
from unimetric.datasets.files import walk
from unimetric.deploy.building import build
from unimetric.deploy.embedding import Embedder
from unimetric.deploy.embedding import _Reader as Reader
from unimetric.deploy.export import write_model
from unimetric.deploy.index import Index
from unimetric.deploy.sharding import Cluster
from unimetric.images.pack import count_cores
from unimetric.runs.device import peak_memory
from unimetric.runs.model import build_model


class Decoded:
    """Images as any tutorial reads them."""

    def __init__(self, paths: list[str], embedder: Embedder) -> None:
        self.paths, recipe = paths, embedder.view.recipe
        self.transform = v2.Compose([v2.PILToTensor(), v2.Resize(recipe.resize, antialias=True), v2.CenterCrop(recipe.size)])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> torch.Tensor:
        with Image.open(self.paths[row]) as image:
            return self.transform(image.convert("RGB"))


@torch.inference_mode()
def bare(embedder: Embedder, paths: list[str], workers: int) -> None:
    """Decode the images and run the network."""
    loader: Any = DataLoader(
        Decoded(paths, embedder), batch_size=embedder.batch, num_workers=workers, pin_memory=embedder.device.type == "cuda"
    )
    for images in loader:
        images = images.to(embedder.device, non_blocking=True).float() / 255
        found = embedder.model((images - embedder.mean) / embedder.std)[0]
    found.cpu()


def read(embedder: Embedder, paths: list[str]) -> None:
    """Read, decode and crop the images as an index does, in this process."""
    reader = Reader(embedder.view)
    for path in paths:
        reader[path, None]


class Predictor:
    """The bare loop as an actor of Ray Data."""

    def __init__(self, config: RunConfig) -> None:
        self.embedder = Embedder(config, build_model(config))

    @torch.inference_mode()
    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        decoded = Decoded(batch["item"].tolist(), self.embedder)
        images = torch.stack([decoded[row] for row in range(len(decoded))]).to(self.embedder.device).float() / 255
        return {"embeddings": self.embedder.model((images - self.embedder.mean) / self.embedder.std)[0].cpu().numpy()}


def ray_data(config: RunConfig, paths: list[str], workers: int, batch: int) -> None:
    """Embed the images by Ray Data, and drop the result."""
    import ray

    options = {"fn_constructor_args": [config], "batch_size": batch, "concurrency": workers, "num_cpus": 1}
    found = ray.data.from_items(paths, override_num_blocks=max(workers, len(paths) // 4096)).map_batches(Predictor, **options)
    assert sum(len(each["embeddings"]) for each in found.iter_batches(batch_size=4096)) == len(paths)


def kill_workers(index: Path, count: int, over: threading.Event) -> None:
    """Kill processes that embed a shard, one after another."""
    for _ in range(count):
        before = {file.name for file in index.glob("shards/*")}
        while not over.wait(0.2):
            late = {file.name for file in index.glob("shards/*")} - before
            if late and any(kill_worker(each) for each in psutil.Process().children(recursive=True)):
                break


def kill_worker(process: psutil.Process) -> bool:
    """Kill a process if it embeds a shard, and return whether it did."""
    with suppress(psutil.Error, ProcessLookupError):
        if "ray::embed_shard" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            print(f"killed worker {process.pid}", flush=True)
            return True
    return False


def clock(function: Callable[[], Any], images: int) -> dict[str, float]:
    """Return images per second, and milliseconds of processor time per image: of all processes, and of this one."""

    def processor_time() -> float:
        used = 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with suppress(psutil.Error):
                used += sum(process.cpu_times()[:4])  # user and system, then those of children that have ended
        return used

    begun, used, own = time.perf_counter(), processor_time(), time.process_time()
    function()
    return {
        "images_per_second": images / (time.perf_counter() - begun),
        "milliseconds_per_image": 1000 * (processor_time() - used) / images,
        "milliseconds_here": 1000 * (time.process_time() - own) / images,
    }


def synthesize(count: int, folder: Path) -> list[str]:
    """Write JPEG files of 48 x 48 pixels, each of a different random pattern."""
    rng, paths = np.random.default_rng(0), []
    for number in range(count):
        path = folder / f"{number // 1000:05d}" / f"{number:08d}.jpg"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = BytesIO()
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((48, 48), Image.Resampling.BILINEAR).save(file, "jpeg")
        path.write_bytes(file.getvalue())
        paths.append(str(path))
    return paths


def content(path: Path) -> str:
    """Return a hash of the ids, vectors and columns of an index, in their order."""
    found = hashlib.sha256()
    with Index.open(path) as index:
        for ids, vectors, columns in index.store.scan():
            found.update(repr((ids, columns)).encode() + vectors.tobytes())
    return found.hexdigest()


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


class Turns:
    """Turns of a benchmark on one set of images."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.over = options, folder, threading.Event()
        if options.folder is None:
            settings = {"backbone": options.model or "small(channels=32)", "transform": "glyphs(size=32)"}
            self.paths = synthesize(options.images, folder / "images")
        else:
            settings = {"backbone": options.model or "efficientnet_lite"}
            self.paths = copies(options.folder, options.images, folder / "images")
        self.config = from_settings(settings | {"head": "identity"}, "benchmark")
        model = build_model(self.config)
        write_model(self.config, model, folder / "model", "benchmark")
        self.embedder = Embedder(self.config, model)
        self.found: dict[str, list[dict[str, float]]] = {}
        self.bytes: dict[str, float] = {}

    def turn(self, number: int) -> None:
        """Time each way once."""
        workers, store = self.options.workers, {"store": self.options.store}
        source, index = self.folder / "images", self.folder / f"{number}.index"
        some = self.paths[:20_000]
        if number == 0:  # one process reads all images, which takes long
            self._time("read", lambda: read(self.embedder, some), len(some))
        self._time("bare", lambda: bare(self.embedder, some, workers), len(some))
        self._time("index", lambda: build(self.folder / "model", source, index, workers=workers, **store))
        if self.options.ray:
            there, cluster = self.folder / f"{number}.ray.index", Cluster("local", workers=workers)
            cluster.connect()
            killer = threading.Thread(target=kill_workers, args=(there, self.options.kill, self.over), daemon=True)
            killer.start()
            self._time("ray", lambda: build(self.folder / "model", source, there, cluster=cluster, **store))
            self.over.set()
            assert content(there) == content(index)
            if not self.options.without_ray_data:
                self._time("ray_data", lambda: ray_data(self.config, self.paths, workers, self.embedder.batch))
        with Index.open(index) as opened:
            assert len(opened) == len(self.paths)
        parts = {"vectors": index / "store", "list_of_files": index / "files.db"}
        for name, part in parts.items():
            size = sum(file.stat().st_size for file in (part, *part.rglob("*")) if file.is_file())
            self.bytes[name] = round(size / len(self.paths), 1)

    def _time(self, name: str, function: Callable[[], Any], images: int = 0) -> None:
        self.found.setdefault(name, []).append(clock(function, images or len(self.paths)))
        print(name, json.dumps({key: round(value, 3) for key, value in self.found[name][-1].items()}), flush=True)

    def ratio(self, name: str, key: str) -> float:
        """Return the median ratio of a way to the bare loop of the same turn; above 1 is faster."""
        ratios = [each[key] / before[key] for before, each in zip(self.found["bare"], self.found[name], strict=True)]
        middle = statistics.median(ratios)
        return round(middle if key == "images_per_second" else 1 / middle, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of images (default: synthetic ones)")
    parser.add_argument("--model", default="", help="backbone spec string")
    parser.add_argument("--images", type=int, default=1024, help="images per turn")
    parser.add_argument("--workers", type=int, default=min(16, count_cores()), help="processes that read images")
    parser.add_argument("--turns", type=int, default=3, help="turns of each")
    parser.add_argument("--store", default="flat", help="store spec string")
    parser.add_argument("--ray", action="store_true", help="also build on a local Ray cluster, and by Ray Data")
    parser.add_argument("--without-ray-data", action="store_true", help="skip Ray Data")
    parser.add_argument("--kill", type=int, default=0, help="with --ray: workers to kill in the first turn")
    parser.add_argument("--scratch", type=Path, help="folder for images and indexes (default: that of temporary files)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    stolen = Stolen()
    folder = Path(tempfile.mkdtemp(prefix="indexing", dir=options.scratch))
    try:
        turns = Turns(options, folder)
        bare(turns.embedder, turns.paths[: 2 * turns.embedder.batch], options.workers)
        for number in range(options.turns):
            turns.turn(number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    median = {name: {key: round(statistics.median(turn[key] for turn in each), 3) for key in each[0]} for name, each in turns.found.items()}
    others = [name for name in turns.found if name not in ("read", "bare")]
    found = {
        "model": turns.config.backbone,
        "images": options.images,
        "workers": options.workers,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        **median,
        "throughput_ratio": {name: turns.ratio(name, "images_per_second") for name in others},
        "processor_time_ratio": {name: turns.ratio(name, "milliseconds_per_image") for name in others},
        "bytes_per_image": turns.bytes,
        "peak_memory_gib": peak_memory(torch.device("cpu")),
        "stolen": str(stolen),
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
