"""Small trees of pictures in the layouts of the official downloads, made by the tests themselves."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 120, 40)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def plant(jpeg: bytes) -> Callable[[Path, Iterable[str]], None]:
    """plant(folder, names): put a tiny picture at each name."""

    def plant_pictures(folder: Path, names: Iterable[str]) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(jpeg)

    return plant_pictures


@pytest.fixture(autouse=True)
def own_data(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Only the tests on real data look at the user's UNIMETRIC_DATA."""
    if request.node.path.name != "test_real.py":
        monkeypatch.delenv("UNIMETRIC_DATA", raising=False)
