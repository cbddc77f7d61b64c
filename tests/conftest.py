"""What every test shares: shapes are checked at run time, letters are drawn once, one thread a worker."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("UNIMETRIC_CACHE", str(Path(__file__).parents[1] / ".venv" / "cache"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: more threads only wait for each other
os.environ.setdefault("RAY_worker_niceness", "0")  # with the default of 15, busy programs delay them

import math

import numpy as np
import torch

from unimetric.cli import main
from unimetric.config import RunConfig, from_settings, load
from unimetric.errors import Interrupted
from unimetric.images import packing
from unimetric.kinds import Sampler
from unimetric.samplers.samples_per_class import SamplesPerClass
from unimetric.spec import create


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collection: they create a million objects, and all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def x86() -> bool:
    """Whether this is an x86 CPU. On ARM, the rounding of a product depends on the number of its rows."""
    return platform.machine().lower() in ("x86_64", "amd64")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def small_disk() -> Callable[[], AbstractContextManager[None]]:
    """While inside, no file of this process may grow beyond 4 KiB: the system's own limit, and so its own error."""

    @contextmanager
    def limited() -> Iterator[None]:
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limited


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Armenian letters: six classes to train on, six to test on, as a pack."""
    table = create("datasets", "glyphs(blocks='armenian')")
    classes = np.unique(table.labels)
    chosen = np.concatenate([np.unique(table.labels[table.train])[:6], np.unique(table.labels[~table.train])[:6]])
    assert len(classes) > len(chosen)
    path = tmp_path_factory.mktemp("letters") / "letters.pack"
    packing.write(path, table.take(np.isin(table.labels, chosen)), short_side=None, encoding="raw")
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


@pytest.fixture(scope="module")  # while Playwright runs, `asyncio.run` fails
def chromium() -> Iterator[Any]:
    """The Chromium of UNIMETRIC_CHROMIUM, on the path, or of Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    file = os.environ.get("UNIMETRIC_CHROMIUM") or next((found for name in names if (found := shutil.which(name))), None)
    with playwright.sync_playwright() as play:
        try:
            browser = play.chromium.launch(executable_path=file, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium here (install one, or name it in UNIMETRIC_CHROMIUM): {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run a command in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["unimetric", *words])
    with pytest.raises(SystemExit) as leaving:
        main()
    return int(leaving.value.code or 0)


def run_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    """Run a command in this process. Return its exit code, its output and its errors."""
    code = exit_code(monkeypatch, *words)
    out = capsys.readouterr()
    return code, out.out, out.err


def changed(config: RunConfig, **settings: object) -> RunConfig:
    return from_settings(asdict(config) | settings)


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def interrupt(config: RunConfig, folder: Path, sampler: type[Sampler] = SamplesPerClass) -> None:
    """Train until the second step of the second epoch."""
    from unimetric.training.loop import train  # loads Lightning, which most tests do not need

    original = sampler.batch

    def batch(self: Sampler, step: int) -> np.ndarray:
        if (self.epoch, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(sampler, "batch", batch)
        train(config, folder, quiet=True)


#: A study of eight runs that learns next to nothing, fast.
GRID = """
dataset = "glyphs(blocks='shapes')"
transform = "glyphs"
backbone = "small(channels=8)"
head = "linear(dim=8)"
optimizer = "adam(lr=1e-3)"
metrics = ["recall(k=1)", "spectral_decay"]
epochs = 1
batch_size = 16
logger = "none"
device = "cpu"
workers = 0
seed = [0, 1]
loss = ["margin", "multi_similarity", "triplet", "contrastive"]
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "tiny.toml"
    path.write_text(GRID)
    return path


def distance(x: list[float], y: list[float], geometry: str, curvature: float = 0.1) -> float:
    """Between two points, from the definition of each geometry."""
    if geometry == "cosine":
        dot = sum(a * b for a, b in zip(x, y, strict=True))
        return 1 - dot / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    if geometry == "inner":
        return -sum(a * b for a, b in zip(x, y, strict=True))
    if geometry == "euclidean":
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))
    # Moebius addition of -x and y, as Ganea et al. 2018 and Ermolov et al. 2022 write it.
    xy, xx, yy = -sum(a * b for a, b in zip(x, y, strict=True)), sum(a * a for a in x), sum(b * b for b in y)
    c, below = curvature, 1 + 2 * curvature * xy + curvature**2 * xx * yy
    added = [((1 + 2 * c * xy + c * yy) * -a + (1 - c * xx) * b) / below for a, b in zip(x, y, strict=True)]
    return 2 / math.sqrt(c) * math.atanh(math.sqrt(c) * math.sqrt(sum(a * a for a in added)))


def rank(embeddings: np.ndarray, labels: np.ndarray, query: np.ndarray, gallery: np.ndarray, geometry: str) -> list[list[bool]]:
    """For every query that has a match: whether its neighbours match, nearest first, equals by index, itself left out."""
    rows = []
    points = embeddings.tolist()
    for i in np.flatnonzero(query):
        others = [j for j in np.flatnonzero(gallery) if j != i]
        others.sort(key=lambda j: (distance(points[i], points[j], geometry), j))
        if any(labels[j] == labels[i] for j in others):
            rows.append([bool(labels[j] == labels[i]) for j in others])
    return rows


@pytest.fixture
def naive() -> Callable[..., list[list[bool]]]:
    return rank


@pytest.fixture
def crowd() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Classes of uneven size around centres of their own, float64, within the unit ball."""

    def make(pictures: int = 60, classes: int = 7, dim: int = 5, seed: int = 0, spread: float = 0.8) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, classes, pictures)
        points = rng.normal(size=(classes, dim))[labels] + spread * rng.normal(size=(pictures, dim))
        points /= 1.1 * np.linalg.norm(points, axis=1).max()
        return torch.from_numpy(points), torch.from_numpy(labels)

    return make
