"""LanceDB: the recall of its index, names and literals in filters, and tables that it must not open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stores.conftest import clustered, recall_of

from unimetric.errors import UnimetricError
from unimetric.spec import create
from unimetric.stores import _recall
from unimetric.stores._where import Comparison

lancedb = pytest.importorskip("lancedb")

from unimetric.stores.lance import Lance, _decoded, _encoded  # noqa: E402

MODULE = sys.modules[Lance.__module__]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an index be built for a thousand points, with partitions of fifty."""
    monkeypatch.setattr(MODULE, "_INDEXED", 1000)
    monkeypatch.setattr(MODULE, "_PARTITION", 50)
    monkeypatch.setitem(_recall.DEPTHS, 10, 100)
    monkeypatch.delitem(_recall.DEPTHS, 100)


def filled(path: Path, text: str = "lance(recall=0.95)", count: int = 2000, dim: int = 16) -> tuple[Any, np.ndarray]:
    store, points = create("stores", text, path=str(path), dim=dim), clustered(count, dim)
    store.write([f"{row}" for row in range(count)], points, {"row": range(count)})
    return store, points


@pytest.mark.parametrize("dim", [16, 12])
def test_finish_builds_an_index_and_measures_its_recall(small: None, tmp_path: Path, dim: int) -> None:
    store, points = filled(tmp_path, dim=dim)
    assert recall_of(store, points) == 1 and not store.report
    store.finish()
    measured = store.report["settings"]["10"]
    assert 0.95 <= measured["recall"] <= 1 and measured["low"] <= measured["recall"] <= measured["high"] and measured["queries"] == 100
    assert measured["probes"] < 40
    assert {index.index_type for index in store._table.list_indices()} == {"IvfRq" if dim == 16 else "IvfSq", "BTree"}
    again = create("stores", "lance(recall=0.95)", path=str(tmp_path), dim=dim)
    assert dict(again.report) == dict(store.report)
    for each in (store, again):
        assert recall_of(each, points) >= 0.93
        assert recall_of(each, points, Comparison("row", "<", 1500), slice(1500)) >= 0.93  # by the index
        assert recall_of(each, points, Comparison("row", "<", 20), slice(20)) == 1  # by a scan


def test_search_by_the_index_differs_from_the_scan(small: None, tmp_path: Path) -> None:
    """With one partition and no candidates to spare, neighbors are missing. So the index is used, and tuning matters."""
    store, points = filled(tmp_path)
    store.finish()
    queries = clustered(100, 16, seed=1)
    scores = store._search_index(queries, 10, None, probes=1, refine=1)[1]
    assert (scores > -2).all()  # partitions with too few points are replaced by a scan
    assert float((scores >= np.sort(queries @ points.T, axis=1)[:, -10:-9] - 1e-6).mean()) < 0.9


def test_finish_raises_if_the_recall_cannot_be_reached(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_LADDER", ((0.01, 1),))
    store, points = filled(tmp_path, "lance(recall=0.999)")
    with pytest.raises(UnimetricError, match=r"recall 0\.999 at 10 cannot be reached"):
        store.finish()
    again = create("stores", "lance(recall=0.999)", path=str(tmp_path), dim=16)
    assert recall_of(again, points) == 1  # not tuned, so it scans


def test_search_rejects_an_index_of_lower_recall(small: None, tmp_path: Path) -> None:
    store, points = filled(tmp_path, "lance(recall=0.5)")
    store.finish()
    notes = json.loads((tmp_path / "tuning.json").read_text())
    notes["settings"]["10"]["recall"] = 0.6
    (tmp_path / "tuning.json").write_text(json.dumps(notes))
    strict = create("stores", "lance(recall=0.9)", path=str(tmp_path), dim=16)
    with pytest.raises(UnimetricError, match=r"measured recall 0\.6 is below the required 0\.9"):
        strict.search(points[:1], 10)
    assert recall_of(create("stores", "lance(recall=1)", path=str(tmp_path), dim=16), points) == 1
    strict.finish()
    assert strict.report["settings"]["10"]["recall"] >= 0.9 and recall_of(strict, points) >= 0.85


def test_finish_adds_new_points_to_the_index_and_compacts(small: None, tmp_path: Path) -> None:
    store, points = filled(tmp_path)
    store.finish()
    version = store._table.version
    store.finish()
    assert store._table.version == version  # nothing has changed
    extra = clustered(300, 16, seed=5)
    for row in range(0, 300, 20):
        store.write([f"new {each}" for each in range(row, row + 20)], extra[row : row + 20], {"row": [-1] * 20})
    store.delete([f"{row}" for row in range(100)])
    store.finish()
    assert recall_of(store, np.concatenate([points[100:], extra])) >= 0.93 and len(store) == 2200
    assert store._table.index_stats("_vector_idx").num_unindexed_rows == 0
    assert len(list((tmp_path / "points.lance" / "data").glob("*.lance"))) <= 2 and len(store._table.list_versions()) == 1


def test_open_table_follows_a_finish_of_another_program(small: None, tmp_path: Path) -> None:
    store, points = filled(tmp_path)
    store.finish()
    server = create("stores", "lance(recall=0.95)", path=str(tmp_path), dim=16)
    assert recall_of(server, points) >= 0.93
    names = [f"{row}" for row in range(2000)]
    store.write([*names, "new"], points[[*range(2000), 0]], {"row": [-1] * 2001})  # `finish` removes the files of all other points
    store.finish()
    assert server.fetch(["1", "new"]) == {"row": [-1, -1]} and len(server) == 2001 and dict(server.report) == dict(store.report)
    for row in (-2, -3):
        store.write(names, points, {"row": [row] * 2000})
        store.finish()
        if row == -2:
            assert recall_of(server, points) >= 0.93 and recall_of(server, points, Comparison("row", "=", -2)) >= 0.93
        else:
            assert np.array_equal(server.vectors(names[:3]), points[:3])


def test_finish_follows_a_finish_of_another_program(small: None, tmp_path: Path) -> None:
    store = filled(tmp_path)[0]
    other = create("stores", "lance(recall=0.95)", path=str(tmp_path), dim=16)
    other.delete([f"{row}" for row in range(10)])
    other.finish()
    store.finish()
    assert len(store) == store.report["rows"] == 1990 and dict(store.report) == dict(other.report)


def test_nothing_is_printed_when_processes_that_read_images_are_forked(tmp_path: Path) -> None:
    # The child ends as a process of multiprocessing does. Threads of LanceDB do not exist in it, so a normal end may wait for them forever.
    code = "import os, sys, unimetric; unimetric.create('stores', 'lance', path=sys.argv[1], dim=8); os.fork() and os.wait() or os._exit(0)"
    quiet = "ignore:This process:DeprecationWarning"  # of Python 3.12 and later, if the main program itself forks
    done = subprocess.run([sys.executable, "-W", quiet, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_names_of_columns_are_encoded_reversibly() -> None:
    for name in ["a", "A", "a_b", "__", "_e9_", "é", "é_", "_é", "select", "a.b`c'd\"", "😀 x"]:
        assert _decoded(_encoded(name)) == name and set(_encoded(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")


@pytest.mark.parametrize(("notes", "problem"), [(None, "was not written by Unimetric"), ({"format": 99, "dim": 16}, "newer version")])
def test_other_tables_are_rejected_and_left_as_they_are(tmp_path: Path, notes: dict[str, Any] | None, problem: str) -> None:
    import pyarrow as pa

    table = pa.table({"x": [1, 2]}).replace_schema_metadata({"unimetric": json.dumps(notes)} if notes else None)
    lancedb.connect(str(tmp_path)).create_table("points", table)
    with pytest.raises(UnimetricError, match=problem):
        create("stores", "lance", path=str(tmp_path), dim=16)
    assert lancedb.connect(str(tmp_path)).open_table("points").to_arrow()["x"].to_pylist() == [1, 2]


def test_damaged_and_half_created_tables(tmp_path: Path) -> None:
    (tmp_path / "half" / "points.lance" / "data").mkdir(parents=True)
    assert len(create("stores", "lance", path=str(tmp_path / "half"), dim=16)) == 0
    points = filled(tmp_path / "cut", count=50)[1]
    for file in (tmp_path / "cut" / "points.lance" / "data").glob("*.lance"):
        file.write_bytes(b"")
    with pytest.raises(UnimetricError, match="cut"):
        create("stores", "lance", path=str(tmp_path / "cut"), dim=16).search(points[:1], 3)
    with pytest.raises(UnimetricError, match="file"):
        (tmp_path / "file").write_text("")
        create("stores", "lance", path=str(tmp_path / "file"), dim=16)
