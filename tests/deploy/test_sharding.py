"""Indexes that a Ray cluster builds: equal to those of one process, also if workers are lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from unimetric import Index
from unimetric.cli import app
from unimetric.deploy import building
from unimetric.deploy.building import build
from unimetric.deploy.measuring import evaluate_index
from unimetric.deploy.sharded_gallery import ShardedGallery
from unimetric.deploy.sharding import Cluster
from unimetric.errors import UnimetricError
from unimetric.geometry.barred import Barred
from unimetric.geometry.nearest import nearest

IMAGES = int(os.environ.get("UNIMETRIC_IMAGES", "600"))
CLUSTER = Cluster("auto", workers=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small JPEG files written long ago, two of them unreadable."""
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    for row in range(IMAGES):
        file = folder / f"class {row % 7}" / f"{row}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (48, 48, 3), np.uint8)).save(file)
        if row in (5, IMAGES - 1):
            file.write_bytes(b"not an image")
        os.utime(file, (1_600_000_000, 1_600_000_000))
    return folder


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_SHARD", 50)  # two batches


def content(path: Path) -> dict[str, tuple[bytes, dict[str, Any]]]:
    found = {}
    with Index.open(path) as index:
        for ids, vectors, columns in index.store.scan():
            for row, id_ in enumerate(ids):
                found[id_] = vectors[row].tobytes(), {name: values[row] for name, values in columns.items()}
        assert index.facts.state == "ready" and len(found) == len(index) == index.facts.count
        found["unreadable"] = b"", dict(index.unreadable())
    return found


def assert_same(one: dict[str, tuple[bytes, dict[str, Any]]], other: dict[str, tuple[bytes, dict[str, Any]]], x86: bool) -> None:
    """Two indexes are equal bit for bit on x86. On ARM, products of few rows are rounded differently."""
    assert one.keys() == other.keys()
    for key, (vector, columns) in one.items():
        assert columns == other[key][1], key
        if vector != other[key][0]:
            assert not x86, key
            np.testing.assert_allclose(np.frombuffer(vector, np.float32), np.frombuffer(other[key][0], np.float32), atol=1e-5)


def _kill_worker(index: Path, killed: list[int]) -> None:
    """Kill the first process that embeds a shard after another shard was written."""
    me = psutil.Process()
    while not killed:
        busy = any(index.glob("shards/*.safetensors"))
        for process in me.children(recursive=True) if busy else []:
            try:
                if "ray::embed_shard" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
                    return
            except (psutil.Error, ProcessLookupError):
                continue
        time.sleep(0.002)


@pytest.mark.usefixtures("cluster", "small_shards")
def test_cluster_with_a_killed_worker_builds_the_same_index(colored: Path, images: Path, tmp_path: Path, x86: bool) -> None:
    counts = build(colored / "run", images, tmp_path / "serial", labels=True, workers=0)
    killed: list[int] = []
    killer = threading.Thread(target=_kill_worker, args=(tmp_path / "there", killed), daemon=True)
    killer.start()
    seen: list[int] = []
    try:
        progress = lambda done, total: seen.append(done)  # noqa: E731
        assert build(colored / "run", images, tmp_path / "there", labels=True, cluster=CLUSTER, progress=progress) == counts
    finally:
        killed.append(0)
        killer.join()
    assert killed[0] > 0, "no worker was caught at work"
    assert counts == {"added": IMAGES - 2, "changed": 0, "deleted": 0, "unreadable": 2}
    assert_same(content(tmp_path / "there"), content(tmp_path / "serial"), x86)
    assert not (tmp_path / "there" / "shards").exists()
    assert seen == [*range(64, IMAGES, 64), IMAGES]
    with Index.open(tmp_path / "there") as index:
        texts = ["recall(k=1)", "map_at_r"]
        assert evaluate_index(index, metrics=texts, cluster=CLUSTER) == evaluate_index(index, metrics=texts)
    stores = [sorted((file.name, file.read_bytes()) for file in (tmp_path / name / "store").iterdir()) for name in ("there", "serial")]
    assert stores[0] == stores[1] or not x86


@pytest.mark.usefixtures("cluster")
def test_sharded_gallery_finds_what_one_process_finds() -> None:
    """Bit for bit, with equal scores across shards, with rows that find fewer than k columns, and with a killed worker."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randint(-2, 3, (700, 4), generator=generator).float()  # many equal scores
    points[:300] = torch.randn(300, 4, generator=generator)
    codes = torch.randint(0, 3, (700,), generator=generator)
    gallery = ShardedGallery(points, CLUSTER)
    assert gallery.starts == [0, 384] and gallery.sizes == [384, 316]
    barred = {
        "none": None,
        "some": Barred(codes, codes),
        "most": Barred(codes * 0, (codes * 0).index_fill(0, torch.tensor([3, 650]), 1)),  # two columns are left
    }
    queries = torch.arange(700)
    for name, each in barred.items():
        for k in (1, 10, 400):
            [(_, values, columns)] = nearest(points, points.clone(), k, own=queries, barred=each)
            [(top, scores, found)] = gallery.nearest(points, k, own=queries, barred=each)
            assert top == 0 and torch.equal(scores, values) and torch.equal(found, columns), (name, k)
            if (name, k) == ("some", 10):
                os.kill(gallery.ray.get(gallery.workers[1].__ray_call__.remote(lambda worker: os.getpid())), signal.SIGKILL)


@pytest.mark.usefixtures("cluster", "small_shards")
def test_finished_shard_files_are_not_computed_again(colored: Path, images: Path, tmp_path: Path, x86: bool) -> None:
    """An altered file of a finished shard shows in the index, so the shard was read from the file."""
    place = tmp_path / "elsewhere"

    def stop(done: int, total: int) -> None:
        while len(list(place.glob("*.safetensors"))) < 3:  # the merged one is not removed yet
            time.sleep(0.01)
        raise KeyboardInterrupt

    away = Cluster("auto", workers=2, shards=f"file://{place}")
    with pytest.raises(KeyboardInterrupt):
        build(colored / "run", images, tmp_path / "there", labels=True, cluster=away, progress=stop)
    for file in place.glob("*.safetensors"):
        found = load_file(file)
        save_file(found | {"embeddings": -found["embeddings"]}, file)
    build(colored / "run", images, tmp_path / "there", labels=True, cluster=away)
    build(colored / "run", images, tmp_path / "serial", labels=True, workers=0)
    there, here = content(tmp_path / "there"), content(tmp_path / "serial")
    pairs = [(np.frombuffer(there[key][0], np.float32), np.frombuffer(here[key][0], np.float32)) for key in here]
    turned = [(one, other) for one, other in pairs if (not np.array_equal(one, other) if x86 else one @ other < 0)]
    assert len(turned) >= 64
    for one, other in turned:
        np.testing.assert_allclose(one, -other, rtol=0, atol=0 if x86 else 1e-5)
    left = set(place.glob("*.safetensors"))
    assert len(left) <= 1  # the file of the shard that was merged before the stop


@pytest.mark.usefixtures("cluster", "small_shards")
def test_damaged_shard_files_and_missing_resources_are_reported(colored: Path, images: Path, tmp_path: Path) -> None:
    def damage(done: int, total: int) -> None:
        while len(list(tmp_path.glob("there/shards/*.safetensors"))) < 2:
            time.sleep(0.01)
        for file in tmp_path.glob("there/shards/*.safetensors"):
            file.write_bytes(b"0" * 100)

    with pytest.raises(UnimetricError, match="cannot be read"):
        build(colored / "run", images, tmp_path / "there", cluster=CLUSTER, progress=damage)
    with pytest.raises(UnimetricError, match="1 GPUs, the cluster has 2 and 0"):
        build(colored / "run", images, tmp_path / "there", cluster=Cluster("auto", gpus=1.0))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpus", "1"], "require `--ray`"),
        (["--shards", "s3://bucket/shards"], "require `--ray`"),
        (["--ray", "auto", "--workers", "0"], "at least 1"),
        (["--ray", "127.0.0.1:1"], "no Ray cluster at"),
    ],
)
def test_command_rejects_wrong_options(colored: Path, tmp_path: Path, words: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["index", str(colored / "run"), str(colored / "images"), "--out", str(tmp_path / "new"), *words])
    assert isinstance(result.exception, UnimetricError) and problem in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_only_an_index_is_evaluated_on_a_cluster(colored: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(colored / "run"), "--ray", "auto"])
    assert isinstance(result.exception, UnimetricError) and "require an index" in str(result.exception)
