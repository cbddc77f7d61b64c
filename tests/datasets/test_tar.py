"""Tar files in the layout of WebDataset: the same images as files, at any position."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from unimetric import Index
from unimetric.config import RunConfig
from unimetric.datasets.files import describe_files
from unimetric.deploy.export import write_model
from unimetric.errors import Interrupted, UnimetricError
from unimetric.images.decode import read_bytes
from unimetric.images.pack import Pack, decode
from unimetric.images.table import Table
from unimetric.runs.model import build_model
from unimetric.samplers import SamplesPerClass
from unimetric.spec import create
from unimetric.training.loop import train


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIMETRIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((6, 8, 3), value, np.uint8)).save(out, "png")
    return out.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Two shards of six images each, of the classes 2 and 10; one name is too long for a plain header."""
    for shard in range(2):
        members: dict[str, bytes] = {}
        for row in range(6):
            key = f"part/{'k' * 120 if row == 3 else row}{shard}"
            label = (2, 10)[row % 2]
            side = {f"{key}.cls": f"{label}\n".encode()} if shard else {f"{key}.json": json.dumps({"label": label, "url": "x"}).encode()}
            members |= {f"{key}.seg.png": png(10 * row + shard)} | side | {f"{key}.txt": b"a caption"}
        write_tar(tmp_path / f"shard-{shard:02d}.tar", members)
    return str(tmp_path / "shard-{00..01}.tar")


def opened(shards: str, **options: str) -> Table:
    return create("datasets", f"tar(shards={shards!r}{''.join(f', {key}={value}' for key, value in options.items())})")


def test_tar_files_are_a_dataset(shards: str, tmp_path: Path) -> None:
    table = opened(shards)
    assert table.class_names == ("2", "10") and table.labels.tolist() == [0, 1] * 6 and table.train.tolist() == [True, False] * 6
    assert [int(decode(path)[0, 0, 0]) for path in table.paths] == [10 * row + shard for shard in range(2) for row in range(6)]
    assert list(table.paths) == sorted(table.paths) and table.source_names == (tmp_path.name,)
    assert opened(str(tmp_path / "*.tar")).paths == table.paths
    assert decode(f"{table.paths[0]}#xywh=1,1,2,3").shape == (3, 2, 3)
    (file,) = describe_files([("id", table.paths[0], {})])
    assert file.size == os.path.getsize(tmp_path / "shard-00.tar") and file.mtime > 0


def test_files_are_scanned_once_unless_they_change(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[Path] = []
    module = importlib.import_module("unimetric.datasets.tar")
    scan = module._scan
    monkeypatch.setattr(module, "_scan", lambda file, field: scanned.append(file) or scan(file, field))
    first = opened(shards)
    assert len(scanned) == 2 and opened(shards).paths == first.paths and len(scanned) == 2
    write_tar(tmp_path / "shard-01.tar", {"a.png": png(1), "a.cls": b"2", "b.png": png(2), "b.cls": b"2"})
    assert len(opened(shards)) == 8 and len(scanned) == 3
    for file in (tmp_path / "cache" / "tar").iterdir():
        file.write_text("{}")
    assert len(opened(shards)) == 8 and len(scanned) == 5
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("")  # cannot be a folder
    assert len(opened(shards)) == 8


def test_file_cut_between_members_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_tar(tmp_path / "cut.tar", {"a.png": png(1), "b.png": png(2), "c.png": png(3)})
    with tarfile.open(file) as archive:
        end = archive.getmembers()[2].offset
    assert len(opened(str(file))) == 3 and not caplog.text
    os.truncate(file, end)
    assert len(opened(str(file))) == 2 and "has no end mark, so files may be missing at its end" in caplog.text


def test_joined_tar_files_are_read_to_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [write_tar(tmp_path / f"{number}.tar", {f"{number}.png": png(number), f"{number}.cls": b"a"}) for number in range(3)]
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(file.read_bytes() for file in files))
    assert [int(decode(path)[0, 0, 0]) for path in opened(str(joined)).paths] == [0, 1, 2]
    joined.write_bytes(joined.read_bytes() + b"no tar file" * 100)
    assert len(opened(str(joined))) == 3 and not caplog.text
    joined.write_bytes(b"".join(file.read_bytes() for file in files)[:-9700])  # in the middle of the last image
    with pytest.raises(UnimetricError, match="not a complete tar file"):
        opened(str(joined))


def test_several_images_of_one_key_give_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("a/1.png", "b/1.png", "b/2.png")
    assert len(opened(str(write_tar(tmp_path / "plain.tar", {name: png(1) for name in names})))) == 3 and not caplog.text
    file = write_tar(tmp_path / "masks.tar", {name: png(1) for name in (*names, "b/2.mask.png")})
    assert len(opened(str(file))) == 4 and "has 4 images of 3 keys; all are used, also masks" in caplog.text


def test_descending_range_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"from the lower to the higher number, got `.*\{002\.\.001\}"):
        opened(f"{tmp_path}/{{002..001}}.tar")


def test_replaced_file_is_an_error_not_another_image(shards: str, tmp_path: Path) -> None:
    table = opened(shards)
    write_tar(tmp_path / "shard-00.tar", {"a.png": png(1), "b.png": png(99)})
    with pytest.raises(UnimetricError, match="was changed"):
        read_bytes(table.paths[5])
    with pytest.raises(UnimetricError, match="was changed"):
        read_bytes(table.paths[0])


def test_images_without_classes_can_be_embedded_only(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "plain.tar", {"a.png": png(1), "._a.png": b"of a file system", "b.png": png(2)})
    table = opened(str(file))
    assert table.class_names == ("",) and len(table) == 2 and not table.train.any()


def test_later_file_of_the_same_name_replaces_the_earlier(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "grown.tar", {"a.png": png(1), "a.cls": b"1", "b.png": png(2), "b.cls": b"1"})
    with tarfile.open(file, "a") as archive:
        for name, data in {"a.png": png(3), "c.png": png(4), "c.cls": b"1"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    table = opened(str(file))
    assert [int(decode(path)[0, 0, 0]) for path in table.paths] == [2, 3, 4]
    assert opened(str(tmp_path / "{grown,*}.tar")).paths == table.paths


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
@pytest.mark.parametrize("name", ["c.png", "c.cls"])
def test_rejects_links_and_sparse_files(tmp_path: Path, kind: bytes, name: str) -> None:
    file = write_tar(tmp_path / "linked.tar", {"a.png": png(1), "a.cls": b"1", "b.png": png(2), "b.cls": b"1"})
    with tarfile.open(file, "a") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "a.png"
        archive.addfile(entry)
    with pytest.raises(UnimetricError, match=f"{name}`: must be a regular file"):
        opened(str(file))


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"a.png": png(1), "a.cls": b"1", "b.png": png(2)}, "has no class"),
        ({"a.png": png(1), "a.json": b"{"}, "a.json`: cannot be read"),
        ({"a.png": png(1), "a.cls": b"\xff"}, "a.cls`: cannot be read"),
        ({"a.txt": b"1"}, "has no images"),
        ({"a.png": png(1), "a.cls": b"1"}, "only one image"),
    ],
)
def test_rejects_incomplete_content(tmp_path: Path, members: dict[str, bytes], problem: str) -> None:
    with pytest.raises(UnimetricError, match=problem):
        opened(str(write_tar(tmp_path / "bad.tar", members)))


def test_rejects_missing_truncated_and_compressed_files(shards: str, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"shard-02\.tar` does not exist"):
        opened(shards.replace("..01}", "..02}"))
    with pytest.raises(UnimetricError, match="does not exist"):
        opened(str(tmp_path / "other-*.tar"))
    whole = (tmp_path / "shard-00.tar").read_bytes()
    (tmp_path / "shard-00.tar").write_bytes(whole[:2500])
    with pytest.raises(UnimetricError, match="not a complete tar file"):
        opened(shards)
    with tarfile.open(tmp_path / "shard-00.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(UnimetricError, match="not a complete tar file") as caught:
        opened(shards)
    assert "decompress" in caught.value.hint


# --- training and indexing --------------------------------------------------------------------------------------------


@pytest.fixture
def letter_shards(letters: Path, tmp_path: Path) -> tuple[str, Path]:
    """The letters as three shards, and as a folder of the same files."""
    table = Pack.open(letters).table
    members: list[dict[str, bytes]] = [{}, {}, {}]
    for row, path in enumerate(table.paths):
        out = io.BytesIO()
        Image.fromarray(decode(path)).save(out, "png")
        label = f"{table.labels[row]:04d}"
        members[row % 3] |= {f"{row:04d}.png": out.getvalue(), f"{row:04d}.cls": label.encode()}
        file = tmp_path / "files" / label / f"{row:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(out.getvalue())
    for shard, some in enumerate(members):
        write_tar(tmp_path / f"letters-{shard}.tar", some)
    return str(tmp_path / "letters-{0..2}.tar"), tmp_path / "files"


def test_interrupted_training_from_tar_files_resumes_exactly(letter_shards: tuple[str, Path], config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, dataset=f"tar(shards={letter_shards[0]!r})", epochs=2, evaluate_every=0, workers=0)
    train(config, tmp_path / "whole", quiet=True)
    original = SamplesPerClass.batch

    def stop(self: SamplesPerClass, step: int) -> np.ndarray:
        if (self.epoch, step) == (1, 1):
            os.kill(os.getpid(), 15)
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(SamplesPerClass, "batch", stop)
        train(config, tmp_path / "broken", quiet=True)
    train(config, tmp_path / "broken", quiet=True)
    whole, broken = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "broken"))
    assert whole.keys() == broken.keys() and all(torch.equal(whole[key], broken[key]) for key in whole)


def test_index_of_tar_files_equals_that_of_files(letter_shards: tuple[str, Path], config: RunConfig, tmp_path: Path) -> None:
    write_model(config, build_model(config), tmp_path / "model", "letters")
    packed = Index.create(tmp_path / "model", letter_shards[0], tmp_path / "tar.index", workers=0)
    single = Index.create(tmp_path / "model", letter_shards[1], tmp_path / "files.index", workers=0, labels=True)
    first, second = content(packed), content(single)
    assert len(first) == 144 and first == second
    path = packed.image_path(ids_of(packed)[0])
    assert packed.search(path, k=1)[0].path == path
    assert packed.update() == {"added": 0, "changed": 0, "deleted": 0, "unreadable": 0}


def ids_of(index: Index) -> list[str]:
    return [id_ for ids, _, _ in index.store.scan() for id_ in ids]


def content(index: Index) -> dict[str, tuple[bytes, str]]:
    """Vector and class of each image by its name, without the folder or the tar file."""
    ids = ids_of(index)
    values = zip(map(bytes, index.store.vectors(ids)), index.fetch(ids)["label"], strict=True)
    return dict(zip([id_.replace(":", "/").rpartition("/")[2] for id_ in ids], values, strict=True))
