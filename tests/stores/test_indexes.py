"""Indexes of images in every store: the commands, updates, and builds and updates that are killed.

`UNIMETRIC_KILLS=50` kills the builds and updates of each store fifty times.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from unimetric import Index
from unimetric.cli import app
from unimetric.config import load
from unimetric.deploy.export import write_model
from unimetric.errors import UnimetricError
from unimetric.runs.model import build_model

KILLS = int(os.environ.get("UNIMETRIC_KILLS", "2"))
OLD = 1_600_000_000
SETTINGS = {"transform": "glyphs(size=32)", "evaluate_batch": 4, "device": "cpu"}


def draw_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    os.utime(path, (OLD, OLD + seed))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A small network in a folder. By its name, an index would reject it, because its weights are random."""
    config = load(backbone="small(channels=8)", head="identity", **SETTINGS)
    return str(write_model(config, build_model(config), tmp_path / "model", "test"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twenty images of four classes."""
    for row in range(20):
        draw_image(tmp_path / "images" / f"größe {row % 4}" / f"{row}'s.png", row)
    return tmp_path / "images"


def content(path: Path) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """All points of an index; an id that is there twice is an error."""
    found: dict[str, tuple[bytes, dict[str, Any]]] = {}
    with Index.open(path) as index:
        for ids, vectors, columns in index.store.scan():
            for row, id_ in enumerate(ids):
                assert id_ not in found
                found[id_] = (vectors[row].tobytes(), {name: values[row] for name, values in columns.items()})
        assert len(index) == len(found)
    return found


def invoke(*words: Any) -> str:
    shown = CliRunner().invoke(app, [str(word) for word in words])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    return shown.output


def test_commands_build_search_evaluate_and_update(spec: str, model: str, images: Path, tmp_path: Path) -> None:
    out, query = tmp_path / "my.index", images / "größe 2" / "6's.png"
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    words = ["index", model, images, "--out", out, "--store", spec, "--labels", "--workers", 0, *settings]
    assert "20 images (20 added, 0 changed, 0 deleted)" in invoke(*words)
    assert "20 images (0 added, 0 changed, 0 deleted)" in invoke(*words)
    found = json.loads(invoke("search", out, query, "-k", 9, "--where", "label in ('größe 2', 'it''s')", "--json"))
    assert found["query"] == str(query) and {hit["columns"]["label"] for hit in found["hits"]} == {"größe 2"}
    assert len(found["hits"]) == 5 and found["hits"][0]["path"] == str(query) and found["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    lines = invoke("evaluate", out, "--metrics", "recall(k=1); map_at_r").splitlines()
    assert lines[0].split() == ["exact", spec.partition("(")[0]]
    assert all(line.split()[-1] == line.split()[-2] for line in lines[1:3])  # recall 1, so both columns are equal
    before = content(out)
    draw_image(images / "größe 4" / "new.png", 100)
    draw_image(query, 101)
    (images / "größe 0" / "0's.png").unlink()
    assert "20 images (1 added, 1 changed, 1 deleted)" in invoke(*words)
    after = content(out)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"größe 4/new.png", "größe 2/6's.png", "größe 0/0's.png"}
    hit = json.loads(invoke("search", out, images / "größe 4" / "new.png", "-k", 1, "--json"))["hits"][0]
    assert hit["path"].endswith("new.png") and hit["columns"] == {"label": "größe 4"}


def test_new_index_rejects_a_store_with_points(postgres: Any, model: str, images: Path, tmp_path: Path) -> None:
    """A table may outlive the folder of its index. Its points would be found, and never updated."""
    spec = f"pgvector(url='{postgres.url}', table='t{random.getrandbits(60):x}')"
    Index.create(model, images, tmp_path / "first.index", store=spec, workers=0, **SETTINGS).close()
    before = content(tmp_path / "first.index")
    with pytest.raises(UnimetricError, match=r"already holds 20 points") as caught:
        Index.create(model, images, tmp_path / "second.index", store=spec, workers=0, **SETTINGS)
    assert caught.value.hint and not (tmp_path / "second.index" / "index.toml").exists()
    assert content(tmp_path / "first.index") == before


# --- kills -------------------------------------------------------------------------------------------------------------

BUILD = """
from pathlib import Path
from unimetric.deploy import building
building._SHARD = 8
print("ready", flush=True)
building.build(given.pop("model"), given.pop("source"), Path(given.pop("path")), labels=True, workers=0, **given)
"""


def test_killed_builds_and_updates_end_as_unbroken_ones(
    spec: str, model: str, images: Path, tmp_path: Path, forked: Callable[..., str]
) -> None:
    def build(path: Path, store: str, delay: float | None = None) -> str:
        return forked(BUILD, delay, model=model, source=str(images), path=str(path), store=store, **SETTINGS)

    broken, unbroken, draw = tmp_path / "broken.index", tmp_path / "unbroken.index", random.Random(0)
    other = spec.replace("table='", "table='u")
    killed = updates = 0
    while killed < KILLS:
        begun = time.monotonic()
        assert build(unbroken, other) == "ready\n0"
        seconds = time.monotonic() - begun
        for _ in range(5):  # a build that is not killed ends the round
            said = build(broken, spec, draw.uniform(0, 1) * seconds)
            assert said in ("ready\n0", "ready\n-9")
            killed += said.endswith("-9")
            if (broken / "index.toml").exists():
                content(broken)  # nothing twice
            if said.endswith("0") or killed in (KILLS // 2, KILLS):
                break
        assert build(broken, spec) == "ready\n0"
        assert content(broken) == content(unbroken)
        updates += 1
        for row in range(12):  # half of these images are new, the others changed
            draw_image(images / "new" / f"{updates * 6 + row}.png", 100 * updates + row)
        for path in draw.sample(sorted(images.rglob("*.png")), 4):
            path.unlink()
    assert updates > 1 or KILLS < 2
