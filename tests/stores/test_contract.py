"""Contract of every store, for every file of the folder: a new store is covered by being there.

`UNIMETRIC_KILLS=50` kills each store fifty times during writes.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stores.conftest import clustered

from unimetric.errors import UnimetricError
from unimetric.spec import create
from unimetric.stores._where import All, AnyOf, Comparison, Not, Where, from_dict, mask, parse

DIM, K = 16, 10
KILLS = int(os.environ.get("UNIMETRIC_KILLS", "1"))
Open = Callable[..., Any]


@pytest.fixture
def opened(spec: str, tmp_path: Path):
    """Function that opens the store, the same one every time."""
    stores = []

    def open_store(dim: int = DIM) -> Any:
        stores.append(create("stores", spec, path=str(tmp_path / "store"), dim=dim))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture
def gallery() -> tuple[list[str], np.ndarray, dict[str, list[Any]]]:
    """Two thousand points, of which filters keep 50, 10, 1 and 0.5 %."""
    draw = np.random.default_rng(0)
    count = 2000
    rank = draw.permutation(count)
    ids = [f"folder ü/{number}'s image.jpg" for number in range(count)]
    columns = {
        "rank": rank.tolist(),
        "price": [None if each % 7 == 0 else each / 10 for each in rank.tolist()],
        "label": [None if each % 11 == 0 else f"é{each % 5}" for each in rank.tolist()],
        'größe "%s` x': [bool(each % 2) for each in rank.tolist()],
    }
    return ids, clustered(count, DIM), columns


def fill(store: Any, ids: list[str], vectors: np.ndarray, columns: dict[str, list[Any]], batch: int = 700) -> None:
    for top in range(0, len(ids), batch):
        store.write(ids[top : top + batch], vectors[top : top + batch], {key: each[top : top + batch] for key, each in columns.items()})


def expect(queries: np.ndarray, ids: list[str], vectors: np.ndarray, k: int) -> tuple[list[list[str]], np.ndarray]:
    """The answer of numpy in float64."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [[ids[column] for column in row] for row in order], np.take_along_axis(scores, order, 1)


def check_hits(found: tuple[np.ndarray, np.ndarray], expected: tuple[list[list[str]], np.ndarray], k: int) -> None:
    ids, scores = found
    count = len(expected[0][0]) if expected[0] else 0
    assert ids.shape == scores.shape == (len(expected[0]), k) and scores.dtype == np.float32
    assert ids[:, :count].tolist() == expected[0]
    np.testing.assert_allclose(scores[:, :count], expected[1], atol=1e-6)
    assert (ids[:, count:] == "").all() and np.isneginf(scores[:, count:]).all()


def test_answers_are_exact_before_and_after_finish(opened: Open, gallery) -> None:
    ids, vectors, _ = gallery
    store = opened()
    fill(store, *gallery)
    queries = clustered(40, DIM, seed=1)
    expected = expect(queries, ids, vectors, K)
    check_hits(store.search(queries, K), expected, K)
    store.finish()
    for each in (store, opened()):  # opened again, it has the same content
        assert len(each) == len(ids)
        check_hits(each.search(queries, K), expected, K)
        check_hits(each.search(queries[:1], 1), expect(queries[:1], ids, vectors, 1), 1)
        json.dumps(dict(each.report))


@pytest.mark.parametrize("limit", [1000, 200, 20, 10, 3, 0])
def test_filters_return_k_whenever_k_exist(opened: Open, gallery, limit: int) -> None:
    ids, vectors, columns = gallery
    store = opened()
    fill(store, *gallery)
    store.finish()
    kept = np.flatnonzero(np.array(columns["rank"]) < limit)
    queries = clustered(5, DIM, seed=2)
    expected = expect(queries, [ids[row] for row in kept], vectors[kept], K)
    check_hits(store.search(queries, K, parse(f"rank < {limit}", store.columns)), expected, K)


def test_filters_follow_the_logic_of_sql(opened: Open, gallery) -> None:
    ids, vectors, columns = gallery
    store = opened()
    fill(store, *gallery)
    queries = clustered(2, DIM, seed=3)
    for where in [
        from_dict({"label": "é3", "price": {"<": 50}}),
        Not(Comparison("price", "=", 10.1)),
        AnyOf((Comparison("price", "is null"), Comparison("label", "like", "%4"))),
        Comparison('größe "%s` x', "=", True),
        Comparison("rank", ">=", 1990.5),
        Comparison("rank", "in", (1, 2.0, 2.5, 2**63 - 1, -(2**63))),
        Comparison("label", ">", "é2"),
        Comparison("label", "!=", "o'brien\\'; --"),
        Not(Comparison("label", "in", ("é1", "é2"))),
        from_dict({}),
    ]:
        kept = np.flatnonzero(mask(where, columns))
        check_hits(store.search(queries, 20, where), expect(queries, [ids[row] for row in kept], vectors[kept], 20), 20)
    with pytest.raises(UnimetricError, match="unknown column `lable`"):
        store.search(queries, 3, from_dict({"lable": "é3"}))


def random_filter(draw: random.Random, depth: int = 0) -> Where:
    """A filter whose texts would end or change an expression that they were pasted into."""
    kind = draw.randrange(9 if depth < 3 else 6)
    texts = ["'", "''", "\\", "\\'", "'; drop table points; --", "/*", "%", "_", "é%", "{}", "%s", "$1", "?", ":a", "`", '"', "\n"]
    texts += ["\x01", "", "É", "😀", "x' or '1'='1"]
    order = draw.choice(["=", "!=", "<", "<=", ">", ">="])
    if kind < 2:
        return Comparison("text", draw.choice([order, "=", "!="]), draw.choice(texts))
    if kind == 2:
        return Comparison("text", "like", draw.choice([text for text in texts if "\\" not in text]))
    if kind == 3:
        return Comparison("text", "in", tuple(draw.sample(texts, draw.randrange(4))))
    if kind == 4:
        numbers = (0, -1, 0.5, 3.0, 1e300, -1e300, 2**63 - 1, -(2**63), 5e-324)
        return Comparison(draw.choice(["whole", "fraction"]), order, draw.choice(numbers))
    if kind == 5:
        return draw.choice([Comparison("text", "is null"), Comparison("truth", draw.choice(["=", "!="]), draw.random() < 0.5)])
    if kind == 6:
        return Not(random_filter(draw, depth + 1))
    parts = tuple(random_filter(draw, depth + 1) for _ in range(draw.randrange(4)))
    return draw.choice([All, AnyOf])(parts)


def test_filters_with_any_text_match_as_arrays_do(opened: Open) -> None:
    draw = random.Random(0)
    texts = ["'", "a'b", "\\", "'; drop table points; --", "%", "é1", "{}", "%s", "$1", "`", '"', "\n", "", "É", "😀", None]
    columns = {
        "text": texts,
        "whole": [draw.choice([0, 1, -1, 3, 2**63 - 1, -(2**63), None]) for _ in texts],
        "fraction": [draw.choice([0.0, 0.5, -1.0, 3.0, 1e300, -1e300, 5e-324, None]) for _ in texts],
        "truth": [draw.choice([True, False, None]) for _ in texts],
    }
    store, ids = opened(), [f"{row}{text}" for row, text in enumerate(texts)]
    store.write(ids, clustered(len(texts), DIM), columns)
    assert store.fetch(ids) == columns
    for _ in range(60):
        where = random_filter(draw)
        found = set(store.search(clustered(1, DIM), len(texts), where)[0][0]) - {""}
        assert found == {ids[row] for row in np.flatnonzero(mask(where, columns))}, where
    store.delete(ids[:4])
    assert len(store) == len(texts) - 4


def test_upserts_replace_points_with_all_columns(opened: Open, gallery) -> None:
    ids, vectors, columns = gallery
    store = opened()
    fill(store, *gallery)
    store.finish()
    store.write(ids[:3], vectors[10:13], {"label": ["new", None, "new"], "weight": [1, None, 2.5]})
    assert len(store) == len(ids)
    np.testing.assert_array_equal(store.vectors(ids[2::-1]), vectors[12:9:-1])
    fetched = store.fetch([ids[0], ids[1], ids[3]])
    assert fetched["label"] == ["new", None, columns["label"][3]] and fetched["rank"] == [None, None, columns["rank"][3]]
    assert fetched["weight"] == [1.0, None, None] and dict(store.columns)["weight"] is float
    assert {ids[0], ids[10]} == set(store.search(vectors[10:11], 2)[0][0])
    assert store.search(vectors[:1], 5, from_dict({"label": "new"}))[0][0].tolist().count("") == 3


def test_deletes_remove_points_and_ignore_unknown_ids(opened: Open, gallery) -> None:
    ids, vectors, _ = gallery
    store = opened()
    fill(store, *gallery)
    store.finish()
    store.delete(ids[::2])
    store.delete([ids[0], "never written"])
    store.delete([])
    queries = clustered(5, DIM, seed=4)
    for each in (store, opened()):
        assert len(each) == len(ids) // 2
        check_hits(each.search(queries, K), expect(queries, ids[1::2], vectors[1::2], K), K)
    with pytest.raises(UnimetricError, match="unknown id"):
        store.fetch([ids[0]])
    store.write(ids[:1], vectors[:1], {})
    assert len(store) == len(ids) // 2 + 1 and store.search(vectors[:1], 1)[0][0, 0] == ids[0]


def test_scan_returns_everything_once_in_a_stable_order(opened: Open, gallery) -> None:
    ids, vectors, columns = gallery
    store = opened()
    fill(store, *gallery)
    blocks = list(store.scan(batch=300))
    assert max(len(block[0]) for block in blocks) <= 300
    found = [each for block in blocks for each in block[0]]
    assert sorted(found) == sorted(ids) and found == [each for block in store.scan(batch=451) for each in block[0]]
    row = {each: number for number, each in enumerate(ids)}
    for block in blocks:
        rows = [row[each] for each in block[0]]
        np.testing.assert_array_equal(block[1], vectors[rows])
        assert {key: block[2][key] for key in columns} == {key: [values[each] for each in rows] for key, values in columns.items()}


def test_empty_stores_one_point_and_k_beyond_the_gallery(opened: Open) -> None:
    store, point = opened(), clustered(1, DIM)
    check_hits(store.search(point, 3), ([[]], np.empty((1, 0))), 3)
    assert len(store) == 0 and list(store.scan()) == [] and store.vectors([]).shape == (0, DIM) and dict(store.columns) == {}
    store.write([], np.empty((0, DIM), np.float32), {})
    store.finish()
    assert store.search(np.empty((0, DIM), np.float32), 3)[0].shape == (0, 3)
    store.write(["only"], point, {"empty": [None]})
    store.finish()
    check_hits(store.search(point, 3), expect(point, ["only"], point, 3), 3)
    assert store.fetch(["only"]).get("empty", [None]) == [None]
    store.delete(["only"])
    store.finish()
    assert len(store) == 0 and store.search(point, 1)[0].tolist() == [[""]]


def test_searches_accept_text_dictionaries_and_no_queries(opened: Open) -> None:
    store, points = opened(), clustered(60, DIM)
    store.write([str(each) for each in range(60)], points, {"price": list(range(60))})
    for where in ("price < 2", {"price": {"<": 2}}):
        assert sorted(store.search(points[:1], 3, where)[0][0]) == ["", "0", "1"]
    assert store.search(points[:0], 2)[0].shape == (0, 2)
    with pytest.raises(UnimetricError, match="must be text or a dictionary, got int"):
        store.search(points[:1], 3, 5)
    for k, problem in ((0, "at least 1, got 0"), ("3", "an integer, got '3'"), (3.0, "an integer, got 3.0"), (True, "an integer")):
        with pytest.raises(UnimetricError, match=f"`k` must be {problem}"):
            store.search(points[:1], k)
    assert store.search(points[:1], np.int64(2))[0].shape == (1, 2)


def test_several_writers_lose_nothing(opened: Open) -> None:
    first = opened()
    first.write(["first"], clustered(1, DIM), {})

    def write(start: int) -> None:
        store = opened()  # its own, as in another process
        for each in range(start, start + 200, 20):
            store.write([str(number) for number in range(each, each + 20)], clustered(20, DIM), {"even": [each % 40 == 0] * 20})

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write, start) for start in (0, 200)]:
            done.result()
    assert sorted(each for ids, _, _ in opened().scan() for each in ids) == sorted(["first", *map(str, range(400))])
    first.write(["last"], clustered(1, DIM), {})
    first.delete(["0", "first"])
    first.finish()
    assert len(first) == len(opened()) == 400


def test_changes_follow_those_of_other_programs(opened: Open) -> None:
    points = clustered(3, DIM)
    first = opened()
    first.write(["b"], points[1:2], {"size": [2]})
    other = opened()
    first.write(["a"], points[:1], {"size": [1]})
    other.delete(["a"])
    other.write(["b", "c"], points[1:], {"size": [3, 4]})
    assert sorted(each for ids, _, _ in opened().scan() for each in ids) == ["b", "c"]
    assert opened().fetch(["b", "c"]) == {"size": [3, 4]}


def test_finish_during_changes_loses_nothing(opened: Open) -> None:
    points = clustered(300, DIM)
    first, other = opened(), opened()
    first.write([str(each) for each in range(300)], points, {})

    def change() -> None:
        for each in range(0, 60, 2):
            other.delete([str(each)])
            other.write([f"new {each}"], points[each : each + 1], {})

    with ThreadPoolExecutor(1) as threads, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters are those of all threads
        changed = threads.submit(change)
        while not changed.done():
            first.finish()
        changed.result()
    first.finish()
    held = {str(each) for each in range(60, 300)} | {str(each) for each in range(1, 60, 2)} | {f"new {each}" for each in range(0, 60, 2)}
    for store in (first, opened()):
        assert {each for ids, _, _ in store.scan() for each in ids} == held


def test_threads_read_one_store_at_once(opened: Open, gallery) -> None:
    ids, vectors, columns = gallery
    store = opened()
    store.write(ids, vectors, columns)
    names, kinds = ids[:40], dict(store.columns)

    def read(number: int) -> None:
        for row in range(number, 40, 4):
            found, _ = store.search(vectors[row : row + 1], 1, "rank >= 0")
            assert found.tolist() == [[ids[row]]] and len(store) == len(ids) and store.columns == kinds
            assert store.fetch(names[row:])["rank"] == columns["rank"][row:40]
            assert (store.vectors(names[:row]) == vectors[:row]).all()
            assert sum(len(some) for some, _, _ in store.scan(500)) == len(ids)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_wrong_points_change_nothing(opened: Open) -> None:
    store, points = opened(), clustered(3, DIM)
    store.write(["a", "b"], points[:2], {"size": [1, 2]})
    for ids, vectors, columns in [
        (["c", "c"], points[:2], {}),
        (["c"], 2 * points[:1], {}),
        (["c"], points[:1, :8], {}),
        (["c"], points[:1], {"size": ["large"]}),
        (["c"], points[:1], {"_id": [1]}),
    ]:
        with pytest.raises(UnimetricError):
            store.write(ids, vectors, columns)
    with pytest.raises(UnimetricError):
        store.search(points[:, :8], 1)
    assert len(store) == 2 and dict(store.columns) == {"size": int}


def test_another_dimension_is_an_error(opened: Open) -> None:
    opened().write(["a"], clustered(1, DIM), {})
    with pytest.raises(UnimetricError, match=rf"dimension.* {DIM}\b"):
        opened(dim=DIM * 2)


def test_reserved_words_and_cases_are_columns(opened: Open) -> None:
    store, points = opened(), clustered(2, DIM)
    columns = {
        name: [number, None]
        for number, name in enumerate(["select", "Select", "order", "id", "vector", "_rowid", "_distance", "a.b", "ctid "])
    }
    store.write(["x", "y"], points, columns)
    assert store.fetch(["x", "y"]) == columns and set(store.columns) == set(columns)
    for number, name in enumerate(columns):
        assert store.search(points[:1], 2, Comparison(name, "=", number))[0].tolist() == [["x", ""]], name


# --- Kills ---------------------------------------------------------------------------------------------

WRITER = """
import sys, numpy as np
from unimetric.spec import create
from unimetric.stores import _recall
{clustered}
start = given["start"]
store = create("stores", given["spec"], path=given["path"], dim=16)
# Indexes of vectors are built and tuned for few points.
module = sys.modules[type(store).__module__]
module._INDEXED, module._PARTITION = 60, 50
_recall.DEPTHS = module.DEPTHS = module._DEPTHS = {10: 20}
print("ready", flush=True)
for step in range(start, start + 1000):
    ids = [f"step{step}/{row}" for row in range(20)]
    # Every step also replaces a point of the step before, and deletes another.
    previous = [f"step{step - 1}/0"] if step > start else []
    store.write(ids + previous, clustered(20 + len(previous), 16, seed=step), {"step": [step] * (20 + len(previous))})
    print("written", step, flush=True)
    if step > start:
        store.delete([f"step{step - 1}/1"])
        print("deleted", step - 1, flush=True)
    if step % 5 == 4:
        store.finish()
"""


def check_after_kill(opened: Open, said: list[str]) -> int:
    """Check that acknowledged steps are stored, nothing twice, each whole or missing. Return the next free step."""
    store = opened()
    written = {int(line.split()[1]) for line in said if line.startswith("written")}
    deleted = {int(line.split()[1]) for line in said if line.startswith("deleted")}
    found: dict[int, dict[int, int]] = {}
    ids = []
    for some, vectors, columns in store.scan():
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
        ids += some
        for each, step in zip(some, columns["step"], strict=True):
            number, row = each.removeprefix("step").split("/")
            found.setdefault(int(number), {})[int(row)] = step
    assert len(ids) == len(set(ids)) == len(store)
    assert written <= set(found)
    for number, rows in found.items():
        assert set(rows) | {1} == set(range(20)) and all(step == number for row, step in rows.items() if row), number
        assert rows[0] in (number, number + 1) and (rows[0] == number + 1) >= (number + 1 in written), number
        assert number not in deleted or 1 not in rows
    if ids:
        assert len(set(store.search(clustered(1, DIM), 20)[0][0]) - {""}) == min(20, len(ids))
    store.close()
    return max(found, default=0) + 2


def test_kills_during_writes_lose_nothing(opened: Open, spec: str, tmp_path: Path, forked: Callable[..., str]) -> None:
    said: list[str] = []
    draw, start = random.Random(0), 0
    spec = spec.replace("recall=1", "recall=0.5")
    code = WRITER.replace("{clustered}", inspect.getsource(clustered))
    opened().close()
    for _ in range(KILLS):
        found = forked(code, draw.uniform(0, 1.5), spec=spec, path=str(tmp_path / "store"), start=start)
        assert found.startswith("ready\n") and found.endswith("-9"), found
        said += found.splitlines()[:-1]
        time.sleep(0.2)  # a server ends the transaction of a client that is gone
        start = check_after_kill(opened, [line for line in said if len(line.split()) == 2])
    assert any(line.startswith("deleted") for line in said)
