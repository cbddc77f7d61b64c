"""A small real index, and real servers of it."""

from __future__ import annotations

import contextlib
import csv
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

CLASSES = {"o'range": (230, 120, 20), "green": (30, 160, 60), "blue": (40, 70, 210), "gray": (128, 128, 128)}


@pytest.fixture(scope="session")
def colored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of four classes, a csv file with their columns, and an index of them."""
    from unimetric import Index
    from unimetric.config import load
    from unimetric.training.loop import train

    folder = tmp_path_factory.mktemp("colored")
    rng = np.random.default_rng(0)
    rows = []
    for number, (label, color) in enumerate(CLASSES.items()):
        for each in range(8):
            noise = rng.normal(0, 25, (6, 8, 3)) + color
            file = folder / "images" / f"class {number}" / f"a&b #{each}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.clip(0, 255).astype(np.uint8)).resize((64, 48), Image.Resampling.NEAREST).save(file)
            rows.append({"path": str(file.relative_to(folder)), "label": label, "price": 10 * number + each, "new": each % 2 == 0})
    with open(folder / "images.csv", "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    config = load(
        dataset=f"folder(root='{folder / 'images'}')",
        transform="glyphs(size=32)",
        backbone="small(channels=16)",
        head="linear(dim=16)",
        split="standard(known_classes=True)",
        batch_size=8,
        epochs=1,
        logger="none",
        device="cpu",
    )
    train(config, folder / "run", quiet=True)
    Index.create(folder / "run", folder / "images.csv", folder / "index", workers=0, device="cpu").close()
    return folder


@pytest.fixture
def index(colored: Path, tmp_path: Path) -> Path:
    """A copy of the index."""
    return Path(shutil.copytree(colored / "index", tmp_path / "my.index"))


@pytest.fixture
def live() -> Iterator[Callable[..., str]]:
    """Start a server in a thread, at a free port, and return its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="pip install 'unimetric[serve]'")
    from unimetric.deploy.connection import configure
    from unimetric.deploy.server import Options, create_app

    with contextlib.ExitStack() as stack:

        def start(index: Path, **options: Any) -> str:
            limits = Options(**{"device": "cpu", "reload": 0.1} | options)
            server = uvicorn.Server(configure(create_app(index, limits), timeout=limits.timeout, port=0))
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()

            def stop() -> None:
                server.should_exit = True
                thread.join(20)

            stack.callback(stop)
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

        yield start
