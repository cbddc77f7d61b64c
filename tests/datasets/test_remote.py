"""Tar files, lists and packs at addresses: a real web server in a process, and the memory of fsspec."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from unimetric import Index
from unimetric.cli import main
from unimetric.config import RunConfig
from unimetric.datasets.files import column_types, read_csv
from unimetric.deploy.building import build, open_source
from unimetric.deploy.embedding import Embedder
from unimetric.deploy.export import write_model
from unimetric.errors import UnimetricError
from unimetric.images import packing, remote
from unimetric.images.decode import read_bytes
from unimetric.images.pack import Pack, decode
from unimetric.images.table import Table
from unimetric.runs.model import build_model
from unimetric.spec import create
from unimetric.training.loop import train

fsspec = pytest.importorskip("fsspec", reason="pip install 'unimetric[storage]'")
pyarrow = pytest.importorskip("pyarrow", reason="pip install 'unimetric[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("aiohttp", reason="pip install 'unimetric[storage]'")


@pytest.fixture(autouse=True)
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMETRIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSES", (0.01, 0.02))


@pytest.fixture(scope="module")
def files(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The letters as three tar files, as a pack, and as single files with a csv and a parquet list."""
    folder = tmp_path_factory.mktemp("served")
    table = Pack.open(letters).table
    lines = ["path,label,number,new"]
    shards: list[dict[str, bytes]] = [{}, {}, {}]
    for row, path in enumerate(table.paths):
        out = io.BytesIO()
        Image.fromarray(decode(path)).save(out, "png")
        label = f"{table.labels[row]:04d}"
        file = folder / "images" / label / f"a #{row}?.png"  # these characters have a meaning in addresses
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(out.getvalue())
        lines.append(f"images/{label}/a #{row}?.png,{label},{row},{row % 2 == 0}")
        shards[row // 48] |= {f"{row:04d}.png": out.getvalue(), f"{row:04d}.cls": label.encode()}
    for shard, members in enumerate(shards):
        with tarfile.open(folder / f"letters-{shard}.tar", "w") as archive:
            for name, data in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    (folder / "letters.csv").write_text("\n".join(lines))
    rows = [each.split(",") for each in lines[1:]]
    columns = {"path": [row[0] for row in rows], "label": [row[1] for row in rows], "number": [int(row[2]) for row in rows]}
    columns |= {"new": [row[3] == "True" for row in rows], "price": [None, float("nan"), 0.5] + [1e-9] * (len(rows) - 3)}
    parquet.write_table(pyarrow.table(columns | {"code": ["7"] * len(rows)}), folder / "letters.parquet", row_group_size=50)
    packing.write(folder / "letters.pack", table, short_side=None, encoding="png")
    packing.write(folder / "raw.pack", table, short_side=None, encoding="raw")
    return folder


class Server:
    """A server process, and what it was asked."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        script = Path(__file__).with_name("range_server.py")
        self.process = subprocess.Popen([sys.executable, str(script), str(folder), str(log)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def requests(self) -> list[tuple[str, int, int, str]]:
        """Return method, status, bytes and path of each request since the last call."""
        lines = [line.split(" ", 3) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self.log.write_text("")
        return [(method, int(status), int(length), path) for method, status, length, path in lines]


@pytest.fixture(scope="module")
def server(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(files, tmp_path_factory.mktemp("log") / "log")
    yield found
    found.process.terminate()
    found.process.wait()


@pytest.fixture
def memory(files: Path) -> Iterator[str]:
    storage = fsspec.filesystem("memory")
    for file in files.rglob("*"):
        if file.is_file():
            storage.pipe_file(f"/bucket/{file.relative_to(files)}", file.read_bytes())
    yield "memory://bucket"
    storage.store.clear()


@pytest.fixture
def model(config: RunConfig, tmp_path: Path) -> Path:
    write_model(config, build_model(config), tmp_path / "model", "letters")
    return tmp_path / "model"


def test_server_without_byte_ranges_is_an_error(server: Server) -> None:
    table = opened(f"tar(shards='{server.url}/whole/letters-0.tar')")  # a small file is scanned whole
    with pytest.raises(UnimetricError, match="must support byte ranges"):
        read_bytes(table.paths[3])


def content(index: Index) -> dict[str, tuple[bytes, ...]]:
    """Vector and columns of each image by its id."""
    ids = [id_ for some, _, _ in index.store.scan() for id_ in some]
    columns = index.fetch(ids)
    values = zip(map(bytes, index.store.vectors(ids)), *(map(repr, columns[key]) for key in sorted(columns)), strict=True)
    return dict(zip(ids, values, strict=True))


def opened(spec: str) -> Table:
    return create("datasets", spec)


# --- indexes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "source"),
    [
        ("server", "letters-{0..2}.tar"),
        ("server", "letters.pack"),
        ("server", "letters.parquet"),
        ("memory", "letters-{0..2}.tar"),
        ("memory", "letters.csv"),
    ],
)
def test_index_of_addresses_equals_that_of_files(
    request: pytest.FixtureRequest, storage: str, source: str, files: Path, model: Path, tmp_path: Path
) -> None:
    found = request.getfixturevalue(storage)
    base = found.url if storage == "server" else found
    workers = 2 if storage == "server" else 0  # processes inherit the connections of this one
    away = Index.create(model, f"{base}/{source}", tmp_path / "away.index", workers=workers)
    here = Index.create(model, files / source, tmp_path / "here.index", workers=0)
    assert len(content(here)) == 144 and content(away) == content(here)
    assert away.facts.root == base and away.facts.unreadable == 0
    hit = away.search(away.image_path(next(iter(content(away)))), k=1)[0]
    assert hit.path.startswith(base) and hit.score > 0.999
    assert away.update() == {"added": 0, "changed": 0, "deleted": 0, "unreadable": 0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="requires fork")
def test_processes_do_not_close_the_connections_of_this_one(server: Server) -> None:
    address = f"{server.url}/letters-0.tar"
    code = f"""
import gc, os
from unimetric.images.remote import file_status
for turn in range(3):
    file_status({address!r})
    if (child := os.fork()) == 0:
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tar_files_are_read_sequentially(server: Server, files: Path, model: Path, tmp_path: Path) -> None:
    server.requests()
    build(model, f"{server.url}/letters-*.tar".replace("*", "{0..2}"), tmp_path / "my.index", workers=0)
    asked = [each for each in server.requests() if each[0] == "GET"]
    size = sum((files / f"letters-{shard}.tar").stat().st_size for shard in range(3))
    assert len(asked) < 40  # of 144 images, and three files that are scanned once
    assert sum(length for _, _, length, _ in asked) < 2.5 * size
    Index.open(tmp_path / "my.index").update(workers=0)
    assert [method for method, *_ in server.requests() if method == "GET"] == []  # neither scanned nor read again


def test_wildcards_of_storage(memory: str, files: Path) -> None:
    found = opened(f"tar(shards='{memory}/letters-*.tar')")
    local = opened(f"tar(shards='{files}/letters-*.tar')")
    assert [path.removeprefix(memory) for path in found.paths] == [path.removeprefix(str(files)) for path in local.paths]
    assert found.source_names == ("bucket",) and found.class_names == local.class_names
    with pytest.raises(UnimetricError, match="does not exist"):
        opened(f"tar(shards='{memory}/other-*.tar')")


def test_bytes_of_a_replaced_file_are_forgotten(memory: str) -> None:
    storage, path = fsspec.filesystem("memory"), f"{memory}/small"
    storage.pipe_file("/bucket/small", b"old")
    before = remote.file_status(path)
    assert remote.read_range(path, 0, 3) == b"old"
    storage.pipe_file("/bucket/small", b"new")
    assert remote.file_status(path) != before and remote.read_range(path, 0, 3) == b"new"
    storage.pipe_file("/bucket/small", b"")
    with pytest.raises(remote.Unreachable, match="shorter"):
        remote.read_range(path, 1, 3)


def test_replaced_file_is_read_again(memory: str, files: Path, model: Path, tmp_path: Path) -> None:
    index = Index.create(model, f"{memory}/letters-{{0,2}}.tar", tmp_path / "my.index", workers=0)
    data = (files / "letters-1.tar").read_bytes()
    fsspec.filesystem("memory").pipe_file("/bucket/letters-0.tar", data)
    (tmp_path / "letters-0.tar").write_bytes(data)
    (tmp_path / "letters-2.tar").write_bytes((files / "letters-2.tar").read_bytes())
    index.update(workers=0)
    assert content(index) == content(Index.create(model, tmp_path / "letters-{0,2}.tar", tmp_path / "new.index", workers=0))


def test_interrupted_build_resumes_when_storage_answers(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unimetric.deploy.building._SHARD", 32)
    source, embed, down = f"{server.url}/letters-{{0..2}}.tar", Embedder.embed, server.folder / "down"
    whole = content(Index.create(model, source, tmp_path / "whole.index", workers=0))
    batches = 0

    def fail_later(self: Embedder, crops: torch.Tensor) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if batches == 2:
            down.touch()
        return embed(self, crops)

    try:
        with monkeypatch.context() as patch, pytest.raises(UnimetricError, match="503") as caught:
            patch.setattr(Embedder, "embed", fail_later)
            build(model, source, tmp_path / "my.index", workers=1)
    finally:
        down.unlink(missing_ok=True)
    assert "run the same command" in caught.value.hint
    begun = Index.open(tmp_path / "my.index")
    assert begun.facts.state == "building" and 0 < len(begun.store) < 144
    counts = build(model, source, tmp_path / "my.index", workers=1)
    assert 0 < counts["added"] < 144 and counts["unreadable"] == 0  # finished shards are not read again
    assert content(Index.open(tmp_path / "my.index")) == whole


def test_missing_image_of_a_list_is_unreadable(server: Server, model: Path, tmp_path: Path) -> None:
    lines = (server.folder / "letters.csv").read_text().splitlines()[:5]
    path = "images" + lines[1].split("images")[1].split(",")[0]
    listed = [f"{server.url}/{path}", f"{server.url}/absent.png", f"{server.url}/forbidden/{path}"]
    (tmp_path / "list.csv").write_text("path\n" + "\n".join(listed))
    index = Index.create(model, tmp_path / "list.csv", tmp_path / "my.index", workers=0)
    assert list(content(index)) == listed[:1] and index.facts.unreadable == 2
    assert index.image_path(listed[0]) == listed[0]
    reasons = (index.path / "unreadable.txt").read_text()
    assert "there is no such file" in reasons and "no permission" in reasons


def test_paths_of_a_remote_list_stay_at_its_storage(memory: str, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    storage = fsspec.filesystem("memory")
    storage.pipe_file(
        "/bucket/bad.csv", f"path\n{tmp_path}/secret.png\n../../..{tmp_path}/secret.png\nfile://{tmp_path}/secret.png".encode()
    )
    found = list(read_csv(f"{memory}/bad.csv", {}))
    assert [each.size for each in found] == [-1] * 3 and all(each.path.startswith(f"{memory}/") for each in found)
    chained = f"http://host/a.tar::file://{tmp_path}/secret.png"
    with pytest.raises(UnimetricError, match="must have neither"):
        read_bytes(chained)


# --- lists -------------------------------------------------------------------------------------------------------------


def test_parquet_list_equals_csv_list(memory: str, files: Path) -> None:
    types = column_types(f"{memory}/letters.parquet")
    assert types == {"label": str, "number": int, "new": bool, "price": float, "code": str}
    found = list(read_csv(f"{memory}/letters.parquet", types))
    expected = list(read_csv(f"{memory}/letters.csv", column_types(f"{memory}/letters.csv")))
    assert [(each.id, each.path, each.size, each.mtime) for each in found] == [
        (each.id, each.path, each.size, each.mtime) for each in expected
    ]
    assert [each.columns["price"] for each in found[:4]] == [None, None, 0.5, 1e-9] and found[0].columns["code"] == "7"
    assert [each.columns | {"price": 0, "code": 0} for each in found] == [each.columns | {"price": 0, "code": 0} for each in expected]
    trained, local = (opened(f"csv(file='{place}/letters.{kind}')") for place, kind in ((memory, "parquet"), (files, "csv")))
    assert np.array_equal(trained.labels, local.labels) and np.array_equal(trained.train, local.train)
    assert np.array_equal(decode(trained.paths[5]), decode(local.paths[5]))


def test_broken_parquet_file_and_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UnimetricError, match=r"cannot read `.*a\.parquet`"):
        column_types(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnimetricError, match="require pyarrow") as caught:
        column_types(tmp_path / "a.parquet")
    assert caught.value.hint == "pip install 'unimetric[parquet]'"


# --- packs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["letters.pack", "raw.pack"])
def test_pack_is_read_by_byte_ranges(server: Server, files: Path, name: str) -> None:
    local = Pack.open(files / name)
    server.requests()
    away = Pack.open(f"{server.url}/{name}")
    assert sum(each[2] for each in server.requests() if each[0] == "GET") < (files / name).stat().st_size
    assert away.fingerprint == local.fingerprint and away.names == local.names
    for row in (100, 3, 143):
        assert np.array_equal(away.picture(row), local.picture(row))
    assert [length for _, _, length, _ in server.requests()] == [int(local.lengths[row]) for row in (100, 3, 143)]
    for one, other in zip(away.decoded(), local.decoded(), strict=True):
        assert np.array_equal(one, other)
    assert len(server.requests()) <= 10
    rows = np.array([5, 1, 2, 90, 7])
    assert np.array_equal(away.decoded(rows)[0], local.decoded(rows)[0])


@pytest.mark.parametrize("residence", ["auto", "stream"])
def test_run_from_remote_pack_equals_that_of_local_pack(
    server: Server, files: Path, config: RunConfig, tmp_path: Path, residence: str
) -> None:
    for place in (server.url, str(files)):
        one = replace(config, dataset=f"pack(path='{place}/letters.pack')", epochs=1, residence=residence, workers=0)
        train(one, tmp_path / str(place == server.url), quiet=True)
    away, here = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("True", "False"))
    weights = [key for key in here if isinstance(here[key], torch.Tensor)]
    assert weights and away.keys() == here.keys() and all(torch.equal(away[key], here[key]) for key in weights)
    records = [json.loads((tmp_path / name / "data.json").read_text()) for name in ("True", "False")]
    assert records[0]["packs"] == records[1]["packs"] and records[0]["train"] == records[1]["train"]


def test_run_from_remote_tar_files_equals_that_of_local_ones(memory: str, files: Path, config: RunConfig, tmp_path: Path) -> None:
    for place in (memory, str(files)):
        one = replace(config, dataset=f"tar(shards='{place}/letters-{{0..2}}.tar')", epochs=1, evaluate_every=0, workers=0)
        train(one, tmp_path / str(place == memory), quiet=True)
    away, here = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("True", "False"))
    assert away.keys() == here.keys() and all(torch.equal(away[key], here[key]) for key in here)


def test_rejects_damaged_remote_packs(memory: str, files: Path) -> None:
    data = (files / "letters.pack").read_bytes()
    storage = fsspec.filesystem("memory")
    for name, damaged, problem in (
        ("short", data[:-100], "truncated or modified"),
        ("table", data[:-100] + b"\0" + data[-99:], "its table was modified"),
        ("other", b"not a pack", "is not a pack"),
    ):
        storage.pipe_file(f"/bucket/{name}.pack", damaged)
        with pytest.raises(UnimetricError, match=problem):
            Pack.open(f"{memory}/{name}.pack")


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("absent.tar", "there is no such file"),
        ("absent.pack", "there is no such file"),
        ("absent.csv", "there is no such file"),
        ("forbidden/letters-0.tar", "no permission"),
        ("forbidden/letters.pack", "no permission"),
        ("whole/letters.pack", "must support byte ranges"),
        ("images", "no such folder, csv file or dataset"),
    ],
)
def test_bad_addresses_are_one_sentence(server: Server, path: str, problem: str) -> None:
    with pytest.raises(UnimetricError, match=problem) as caught:
        list(open_source(f"{server.url}/{path}", labels=False).files())
    assert server.url in caught.value.message and caught.value.hint and "\n" not in caught.value.message


def test_command_ends_with_code_2(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my.index"
    monkeypatch.setattr(sys, "argv", ["unimetric", "index", str(model), "http://127.0.0.1:9/a.tar", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        main()
    text = capsys.readouterr().err
    assert stopped.value.code == 2 and not out.exists()
    assert text.startswith("error: http://127.0.0.1:9/a.tar: cannot be reached") and "hint: check the network" in text


@pytest.mark.parametrize(
    ("address", "module", "problem", "hint"),
    [
        ("s3://bucket/a.tar", "fsspec", "requires fsspec", "unimetric[storage]"),
        ("s3://bucket/a.tar", "s3fs", "s3fs", "install that package"),
        ("gs://bucket/a.pack", "gcsfs", "gcs", "install that package"),
    ],
)
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, address: str, module: str, problem: str, hint: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnimetricError, match=problem) as caught:
        opened(f"tar(shards='{address}')" if address.endswith("tar") else f"pack(path='{address}')")
    assert hint in caught.value.hint


def test_password_in_an_address_is_rejected_and_hidden() -> None:
    with pytest.raises(UnimetricError, match="password") as caught:
        opened("tar(shards='https://me:secret@host/a.tar')")
    assert "secret" not in str(caught.value)
