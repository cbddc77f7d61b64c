"""The flat store: equal to brute force, small on disk, and whole after a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from unimetric.errors import UnimetricError
from unimetric.spec import create
from unimetric.stores import flat as module
from unimetric.stores._where import from_dict, mask, parse
from unimetric.stores.flat import Flat

KILLS = int(os.environ.get("UNIMETRIC_KILLS", "3"))


def unit(count: int, dim: int, seed: int = 0) -> np.ndarray:
    """Points in clusters, so that neighbors differ little."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(20, dim))[rng.integers(0, 20, count)] + 0.3 * rng.normal(size=(count, dim))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def names(count: int, first: int = 0) -> list[str]:
    return [f"images/ä{number:05d}.jpg" for number in range(first, first + count)]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few hundred points exercise blocks, merges and groups."""
    monkeypatch.setattr(module, "_SMALL", 64)
    monkeypatch.setattr(module, "_FEW", 4)
    monkeypatch.setattr(module, "_ROWS", 48)
    monkeypatch.setattr(module, "_QUERIES", 16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_search_equals_brute_force(tmp_path: Path, small_shards: None, dtype: str) -> None:
    vectors, queries = unit(700, 24), unit(40, 24, seed=1)
    ids, price = names(700), [None if row % 7 == 0 else row for row in range(700)]
    store = create("stores", f"flat(dtype='{dtype}')", path=str(tmp_path), dim=24)
    for start in range(0, 700, 30):
        rows = slice(start, start + 30)
        store.write(ids[rows], vectors[rows], {"price": price[rows], "label": [f"c{row % 5}" for row in range(700)][rows]})
    store.delete(ids[100:150])
    store.write(ids[200:210], vectors[300:310], {"price": [5] * 10})
    vectors[200:210], price[200:210] = vectors[300:310], [5] * 10
    labels = [None if 200 <= row < 210 else f"c{row % 5}" for row in range(700)]
    live = np.array([not 100 <= row < 150 for row in range(700)])
    wheres = [None, parse("price < 300 and not label = 'c1'", store.columns), from_dict({"price": 5}), parse("price < 0", store.columns)]
    for finished in (False, True):
        if finished:
            store.finish()
            store = Flat(path=str(tmp_path), dim=24, dtype=dtype)
        assert len(store) == 650
        for where in wheres:
            allowed = live if where is None else live & mask(where, {"price": price, "label": labels})
            scores = queries.astype(np.float64) @ vectors.T.astype(np.float64)
            scores[:, ~allowed] = -np.inf
            order = np.sort(scores, axis=1)[:, ::-1][:, :12]
            found, values = store.search(queries, 12, where)
            assert np.allclose(values, order, atol=2e-3 if dtype == "float16" else 1e-6)
            assert ((found != "") == (order > -np.inf)).all()
            for row in range(len(queries)):
                hits = [each for each in found[row] if each]
                assert len(set(hits)) == len(hits) and all(allowed[ids.index(each)] for each in hits)
                recomputed = scores[row, [ids.index(each) for each in hits]]
                assert np.allclose(recomputed, values[row, : len(hits)], atol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_finished_store_is_small(tmp_path: Path, dtype: str) -> None:
    vectors = unit(4000, 128)
    store = Flat(path=str(tmp_path), dim=128, dtype=dtype)
    for start in range(0, 4000, 250):
        store.write(names(250, start), vectors[start : start + 250], {"label": [f"class {row % 50}" for row in range(250)]})
    store.write(names(500), vectors[:500], {"label": ["other"] * 500})
    store.delete(names(100, 3000))
    store.finish()
    raw = len(store) * (vectors[0].nbytes if dtype != "float16" else vectors[0].nbytes // 2)
    raw += sum(
        len(each.encode()) + len(label) for ids, _, columns in store.scan() for each, label in zip(ids, columns["label"], strict=True)
    )
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert store.report["points"] == 3900 and size <= 1.3 * raw, size / raw
    assert len(list(tmp_path.iterdir())) == 2


def test_scan_fetch_and_vectors_agree(tmp_path: Path, small_shards: None) -> None:
    store = Flat(path=str(tmp_path), dim=8)
    vectors = unit(300, 8)
    columns = {"größe": [1.5] * 299 + [None], "label": ["ß", None] * 150, "known": [True, False, None] * 100, "n": list(range(300))}
    for start in range(0, 300, 50):
        rows = slice(start, start + 50)
        store.write(names(300)[rows], vectors[rows], {key: value[rows] for key, value in columns.items()})
    store.delete(names(3, 7))
    before = [each for ids, _, _ in store.scan(batch=11) for each in ids]
    assert before == names(7) + names(290, 10)
    store.finish()
    assert [each for ids, _, _ in store.scan(batch=64) for each in ids] == before
    some = [names(300)[row] for row in (250, 3, 299, 0)]
    assert np.array_equal(store.vectors(some), vectors[[250, 3, 299, 0]])
    assert store.fetch(some) == {key: [value[row] for row in (250, 3, 299, 0)] for key, value in columns.items()}
    with pytest.raises(UnimetricError, match=r"unknown id `images/ä00007.jpg`"):
        store.fetch([names(1, 7)[0]])


def test_finish_copies_many_bytes_only_for_many_shards(tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHEAP", 3 * 20 * 8 * 4)
    store = Flat(path=str(tmp_path), dim=8)

    def count() -> int:
        store.finish()
        return len(list(tmp_path.glob("*.points")))

    counts = []
    for start in range(0, 100, 20):
        store.write(names(20, start), unit(20, 8, start), {})
        counts.append(count())
    assert counts == [1, 1, 2, 1, 2]  # two of 60 points are too large to merge, three are many, and one of 80 is not small
    assert [each for ids, _, _ in store.scan() for each in ids] == names(100)


def test_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    Flat(path=str(tmp_path), dim=8).write(names(5), unit(5, 8), {"label": ["a"] * 5})
    with safe_open(tmp_path / "00000000.points", framework="np") as file:
        assert np.array_equal(file.get_tensor("vectors"), unit(5, 8))


def test_reader_keeps_its_points_while_a_writer_compacts(tmp_path: Path, small_shards: None) -> None:
    writer = Flat(path=str(tmp_path), dim=8)
    writer.write(names(50), unit(50, 8), {})
    writer.write(names(10, 50), unit(10, 8, 1), {})
    reader = Flat(path=str(tmp_path), dim=8)
    writer.delete(names(30))
    writer.finish()
    assert len(reader) == 60 and len(writer) == 30
    assert reader.search(unit(50, 8), 1)[0][:, 0].tolist() == names(50)
    assert len(Flat(path=str(tmp_path), dim=8)) == 30


def test_rejects_other_and_damaged_stores(tmp_path: Path) -> None:
    store = Flat(path=str(tmp_path), dim=8)
    store.write(names(5), unit(5, 8), {})
    with pytest.raises(UnimetricError, match="holds vectors of 8 dimensions, not 9"):
        Flat(path=str(tmp_path), dim=9)
    with pytest.raises(UnimetricError, match=r"flat\(dtype='float32'\)"):
        Flat(path=str(tmp_path), dim=8, dtype="int8")
    with pytest.raises(UnimetricError, match="shape"):
        store.search(unit(1, 9), 1)
    file, text = tmp_path / "manifest.json", (tmp_path / "manifest.json").read_text()
    for change, problem in (({"version": 99}, "newer Unimetric"), ({"columns": 3}, "cannot be read"), ({"next": "x"}, "cannot be read")):
        file.write_text(json.dumps(json.loads(text) | change))
        with pytest.raises(UnimetricError, match=problem):
            Flat(path=str(tmp_path), dim=8)
    file.write_text(text.replace("00000000.points", "../secret.points"))
    with pytest.raises(UnimetricError, match="outside its folder"):
        Flat(path=str(tmp_path), dim=8)
    file.write_text(text)
    points = tmp_path / "00000000.points"
    points.write_bytes(points.read_bytes()[:-3])
    with pytest.raises(UnimetricError, match=r"00000000\.points: cannot be read: it must have"):
        Flat(path=str(tmp_path), dim=8)
    points.unlink()
    with pytest.raises(UnimetricError, match="is missing"):
        Flat(path=str(tmp_path), dim=8)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e3])
def test_search_finds_damaged_vectors(tmp_path: Path, value: float) -> None:
    store = Flat(path=str(tmp_path), dim=8)
    store.write(names(50), np.eye(8, dtype=np.float32)[np.arange(50) % 8], {})
    store.close()
    (file,) = tmp_path.glob("*.points")
    row = np.eye(8, dtype=np.float32)[2].tobytes()
    assert file.read_bytes().count(row) >= 6
    file.write_bytes(file.read_bytes().replace(row, np.full(8, value, np.float32).tobytes(), 1))
    with pytest.raises(UnimetricError, match=f"{file.name}: has a vector that is not of length 1"):
        Flat(path=str(tmp_path), dim=8).search(unit(3, 8), 5)


def test_stores_of_other_kinds_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("lancedb")
    for kind, other in (("flat", "lance"), ("lance", "flat")):
        store = create("stores", kind, path=str(tmp_path / kind), dim=8)
        store.write(["a"], unit(1, 8), {})
        with pytest.raises(UnimetricError, match=f"is a store `{kind}`"):
            create("stores", other, path=str(tmp_path / kind), dim=8)


def test_full_disk_leaves_the_store_unchanged(tmp_path: Path, small_disk: Callable[[], AbstractContextManager[None]]) -> None:
    store = Flat(path=str(tmp_path), dim=8)
    store.write(names(5), unit(5, 8), {})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with small_disk(), pytest.raises(UnimetricError, match="disk is full") as caught:
        store.write(names(500), unit(500, 8), {})
    assert "free some space" in caught.value.hint
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    store.write(names(10), unit(10, 8), {})
    assert len(store) == 10


def _write(path: str, begin: int, pipe: int) -> None:
    """Write, delete and compact, and acknowledge each call."""
    module._SMALL, module._FEW = 64, 3
    store = Flat(path=path, dim=16)
    vectors = unit(4000, 16)
    for step in range(begin, 100_000):
        first = step * 17 % 3900
        store.write(names(40, first), vectors[first : first + 40], {"step": [step] * 40})
        os.write(pipe, f"w {step}\n".encode())
        store.delete(names(3, first + 5))
        os.write(pipe, f"d {step}\n".encode())
        if step % 5 == 4:
            store.finish()


def _apply(word: str, step: int, points: dict[str, int]) -> dict[str, int]:
    """Return the points after a call."""
    first = step * 17 % 3900
    if word == "w":
        return points | dict.fromkeys(names(40, first), step)
    gone = names(3, first + 5)
    return {key: value for key, value in points.items() if key not in gone}


def test_killed_writer_loses_and_doubles_nothing(tmp_path: Path) -> None:
    expected: dict[str, int] = {}
    rng, step, fork = random.Random(0), 0, multiprocessing.get_context("fork")
    for _ in range(KILLS):
        reading, writing = os.pipe()
        process = fork.Process(target=_write, args=(str(tmp_path / "store"), step, writing))
        process.start()
        os.close(writing)
        first = os.read(reading, 1)  # waits for the first call
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        with open(reading) as stream:
            done = [line.split() for line in (first.decode() + stream.read()).splitlines()]
        for word, number in done:
            expected = _apply(word, int(number), expected)
        word, step = ("w", step) if not done else ("d", int(done[-1][1])) if done[-1][0] == "w" else ("w", int(done[-1][1]) + 1)
        store = Flat(path=str(tmp_path / "store"), dim=16)
        found: dict[str, int] = {}
        for ids, _, columns in store.scan():
            assert not set(ids) & set(found), "a point is stored twice"
            found |= dict(zip(ids, columns["step"], strict=True))
        assert found in (expected, _apply(word, step, expected))  # the killed call has happened as a whole or not at all
        expected = found
    assert step > 0
    store = Flat(path=str(tmp_path / "store"), dim=16)
    store.finish()
    points = {each: vector for ids, vectors, _ in store.scan() for each, vector in zip(ids, vectors, strict=True)}
    assert points.keys() == expected.keys()
    vectors = unit(4000, 16)
    assert all(np.array_equal(vector, vectors[int(each[-9:-4])]) for each, vector in points.items())
    listed = {name for entry in json.loads((tmp_path / "store/manifest.json").read_text())["shards"] for name in entry.values() if name}
    assert {file.name for file in (tmp_path / "store").iterdir()} == listed | {"manifest.json"}
