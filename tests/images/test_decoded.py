"""Decoded copies of packs: made once, equal to the pack, and never in the way."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from unimetric.errors import UnimetricError
from unimetric.images import decoded
from unimetric.images.decoded import decoded_copy
from unimetric.images.loading import Resident, View
from unimetric.images.pack import OPEN_PACKS, Pack
from unimetric.images.packing import write
from unimetric.images.recipe import Recipe
from unimetric.images.table import Table

COUNT = 8


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pack:
    """Pack of small JPEG images, for which a copy is made."""
    monkeypatch.setattr(decoded, "_LEAST", 1)
    monkeypatch.setenv("UNIMETRIC_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((40 + number, 36), Image.Resampling.BICUBIC).save(tmp_path / f"{number}.png")
    paths = tuple(str(tmp_path / f"{number}.png") for number in range(COUNT))
    table = Table(paths=paths, labels=np.arange(COUNT) % 2, class_names=("a", "b"), train=np.arange(COUNT) % 2 == 0)
    return write(tmp_path / "some.pack", table, short_side=None)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the copies that are made."""
    made: list[str] = []

    def counted(path: Path, *args: object, **options: object) -> Pack:
        made.append(Path(path).name)
        return write(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(decoded, "write", counted)
    return made


def test_a_copy_is_made_once_and_has_the_same_pixels(pack: Pack, writes: list[str], tmp_path: Path) -> None:
    first, second = decoded_copy(pack, COUNT), decoded_copy(pack, COUNT)
    assert first.encoding == second.encoding == "raw" and len(writes) == 1
    assert Path(first.path).is_relative_to(tmp_path / "cache" / "decoded")
    for row in range(COUNT):
        assert np.array_equal(pack.picture(row), second.picture(row))


def test_crops_do_not_depend_on_the_copy(pack: Pack) -> None:
    cpu, rows = torch.device("cpu"), np.array([3, 0, 7])
    crops = []
    for copied in (False, True):
        loader = Resident(pack.table, device=cpu, where=cpu, mean=(0.5,) * 3, std=(0.2,) * 3, copied=copied)
        crops.append(next(loader.load([(rows, View(Recipe(size=16, resize=20), seed=1, epoch=2))])))
        assert loader._packs[pack.path].encoding == ("raw" if copied else "jpeg")
    assert torch.equal(*crops)


def test_small_packs_raw_packs_and_few_images_are_not_copied(
    pack: Pack, writes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(tmp_path / "raw.pack", pack.table, short_side=None, encoding="raw")
    assert decoded_copy(raw, COUNT) is raw
    assert decoded_copy(pack, COUNT // 2 - 1) is pack
    monkeypatch.setattr(decoded, "_LEAST", 1 << 28)
    assert decoded_copy(pack, COUNT) is pack
    assert not writes


def test_a_damaged_copy_is_made_again(pack: Pack, writes: list[str]) -> None:
    path = Path(decoded_copy(pack, COUNT).path)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    OPEN_PACKS.clear()
    copy = decoded_copy(pack, COUNT)
    assert len(writes) == 2 and np.array_equal(pack.picture(0), copy.picture(0))


def test_a_copy_of_other_images_is_made_again(pack: Pack, writes: list[str], tmp_path: Path) -> None:
    path = Path(decoded_copy(pack, COUNT).path)
    other = write(tmp_path / "other.pack", pack.table.take(np.arange(COUNT)[::-1]), short_side=None, encoding="raw")
    path.write_bytes(Path(other.path).read_bytes())
    OPEN_PACKS.clear()
    copy = decoded_copy(pack, COUNT)
    assert len(writes) == 2 and np.array_equal(pack.picture(0), copy.picture(0))


def test_a_full_disk_or_a_closed_folder_means_no_copy(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(decoded.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert decoded_copy(pack, COUNT) is pack
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UNIMETRIC_CACHE", str(tmp_path / "file"))
    assert decoded_copy(pack, COUNT) is pack


def test_an_image_that_cannot_be_decoded_is_reported_as_without_a_copy(pack: Pack, tmp_path: Path) -> None:
    path = Path(pack.path)
    content = bytearray(path.read_bytes())
    content[8:200] = bytes(192)
    path.write_bytes(content)
    OPEN_PACKS.clear()
    broken = Pack.open(path, verify=False)
    assert decoded_copy(broken, COUNT) is broken
    assert not list((tmp_path / "cache" / "decoded").glob("*.pack"))
    with pytest.raises(UnimetricError, match=r"some\.pack::0"):
        broken.decoded()


def test_programs_that_start_together_make_one_copy(pack: Pack, writes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, counted = threading.Event(), decoded.write

    def slow(*args: object, **options: object) -> Pack:
        begun.set()
        time.sleep(0.2)
        return counted(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(decoded, "write", slow)
    found: list[Pack] = []
    threads = [threading.Thread(target=lambda: found.append(decoded_copy(pack, COUNT))) for _ in range(3)]
    threads[0].start()
    begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 1 and [copy.encoding for copy in found] == ["raw"] * 3


def test_unused_copies_are_deleted(pack: Pack, tmp_path: Path) -> None:
    old, new = (tmp_path / "cache" / "decoded" / f"{name}.pack" for name in ("old", "new"))
    old.parent.mkdir(parents=True)
    for path, days in ((old, 31), (new, 29)):
        path.write_bytes(b"copy")
        os.utime(path, (time.time() - days * 86400,) * 2)
    decoded_copy(pack, COUNT)
    assert new.exists() and not old.exists()
