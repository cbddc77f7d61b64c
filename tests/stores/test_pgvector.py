"""pgvector against a real PostgreSQL: recall, lists, passwords, and servers that fail."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.stores.conftest import clustered, recall_of

from unimetric.errors import Unavailable, UnimetricError
from unimetric.spec import bind, create
from unimetric.stores._where import Comparison

psycopg = pytest.importorskip("psycopg")

from unimetric.stores.pgvector import Pgvector  # noqa: E402

MODULE = sys.modules[Pgvector.__module__]


@pytest.fixture
def table() -> str:
    return f"t{random.getrandbits(60):x}"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an index be built for a thousand points."""
    monkeypatch.setattr(MODULE, "_INDEXED", 1000)
    monkeypatch.setattr(MODULE, "_DEPTHS", {10: 100, 100: 30, 1000: 10})


def filled(url: str, table: str, more: str = "", count: int = 3000) -> tuple[Any, np.ndarray]:
    store = create("stores", f"pgvector(url='{url}', table='{table}'{more})", path="unused", dim=16)
    points = clustered(count)
    store.write([f"{row}" for row in range(count)], points, {"row": range(count)})
    return store, points


def plan(store: Any, monkeypatch: pytest.MonkeyPatch, query: np.ndarray, where: Any = None) -> str:
    """The plan that PostgreSQL chooses for a search."""
    plans: list[str] = []
    connection = store._connect()
    execute = connection.execute

    def spied(text: str, *values: Any, **options: Any) -> Any:
        if "ORDER BY _vector" in text:
            plans.append(str(execute("EXPLAIN " + text, *values).fetchall()))
        return execute(text, *values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(connection, "execute", spied)
        store.search(query, 10, where)
    return " ".join(plans)


def test_finish_makes_lists_and_measures_their_recall(small: None, postgres, table: str, monkeypatch) -> None:
    store, points = filled(postgres.url, table, ", recall=0.9")
    assert recall_of(store, points) == 1 and not store.report
    store.finish()
    measured = store.report["settings"]["10"]
    assert 0.9 <= measured["recall"] <= 1 and measured["low"] <= measured["recall"] <= measured["high"]
    assert 1 <= measured["probes"] < 27 and len(store._centers) == 55
    again = create("stores", f"pgvector(url='{postgres.url}', table='{table}', recall=0.9)", path="unused", dim=16)
    assert dict(again.report) == dict(store.report)
    assert recall_of(again, points) >= 0.9
    few, many = Comparison("row", "<", 15), Comparison("row", "<", 1500)
    assert f"{table}_list" in plan(again, monkeypatch, points[:1])
    assert f"{table}_list" in plan(again, monkeypatch, points[:1], many)
    assert f"{table}_list" not in plan(again, monkeypatch, points[:1], few)
    assert recall_of(again, points, many, slice(1500)) >= 0.9
    assert recall_of(again, points, few, slice(15)) == 1
    np.testing.assert_array_equal(again.vectors(["7"]), points[7:8])


def lists_of(store: Any) -> dict[str, int]:
    return dict(store._connect().execute(f"SELECT _id, _list FROM {store.table}").fetchall())


def check_lists(store: Any) -> None:
    """Every point is in the list of the nearest center. Rounding may decide between two that are equally near."""
    lists = lists_of(store)
    distances = (store._centers**2).sum(1) - 2 * store.vectors(list(lists)) @ store._centers.T
    own = distances[np.arange(len(lists)), np.array(list(lists.values())) - 1]
    assert min(lists.values()) > 0 and (own <= distances.min(1) + 1e-5).all()


def test_every_point_is_in_the_list_of_the_nearest_center(small: None, postgres, table: str) -> None:
    store, points = filled(postgres.url, table)
    assert set(lists_of(store).values()) == {0}
    store.finish()
    check_lists(store)
    other = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
    more = clustered(200, seed=2)
    other.write([f"more {row}" for row in range(200)], more, {"row": range(200)})
    check_lists(store)
    assert recall_of(store, np.concatenate([points, more])) >= 0.97


def test_new_centers_if_the_points_have_doubled_and_other_programs_use_them(small: None, postgres, table: str) -> None:
    store, points = filled(postgres.url, table)
    store.finish()
    other = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
    more = clustered(3000, seed=2)
    other.write([f"more {row}" for row in range(2999)], more[:2999], {})
    other.finish()
    assert other._version == 1
    other.write(["last"], more[2999:], {})
    other.finish()
    assert other._version == 2 and len(other._centers) == 77 and store._version == 1
    assert recall_of(store, np.concatenate([points, more])) >= 0.97 and store._version == 2
    assert store.report == other.report
    store.write(["later"], more[:1], {})
    assert lists_of(store)["later"] == lists_of(store)["more 0"]


def test_programs_that_compute_centers_at_once_use_the_same(small: None, postgres, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, points = filled(postgres.url, table)
    other, reader = (create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16) for _ in range(2))
    draw = MODULE.draw_points

    def draw_late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(MODULE, "draw_points", draw)
        other.finish()
        reader.search(points[:1], 1)  # reads the centers of `other`
        found, ids = draw(*args, **options)
        return found[::-1].copy(), ids  # other centers

    monkeypatch.setattr(MODULE, "draw_points", draw_late)
    store.finish()
    held = store._connect().execute(f"SELECT vector_send(center) FROM {store._lists} ORDER BY list", binary=True).fetchall()
    centers = MODULE._matrix([row[0] for row in held], 16)
    for each in (store, other, reader):
        each.search(points[:1], 1)
        assert np.array_equal(each._centers, centers)
    assert recall_of(reader, points) >= 0.97


def test_a_search_that_has_begun_uses_the_centers_of_its_beginning(small: None, postgres, table: str, monkeypatch) -> None:
    store, points = filled(postgres.url, table)
    store.finish()
    other = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
    more = clustered(3000, seed=2)
    other.write([f"more {row}" for row in range(3000)], more, {})
    order, replaced = MODULE._order_lists, []

    def order_late(queries: np.ndarray, centers: np.ndarray) -> np.ndarray:
        if not replaced:
            replaced.append(other._make_lists(6000))
        return order(queries, centers)

    monkeypatch.setattr(MODULE, "_order_lists", order_late)
    assert recall_of(store, np.concatenate([points, more])) >= 0.97 and replaced
    assert store._version == 1
    assert recall_of(store, np.concatenate([points, more])) == 1 and store._version == 2


def test_programs_write_search_and_finish_at_once(small: None, postgres, table: str) -> None:
    store, points = filled(postgres.url, table, count=1000)
    store.finish()
    end = time.monotonic() + 3

    def work(number: int) -> int:
        own = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
        turns = 0
        while time.monotonic() < end:
            turns += 1
            if number < 2:
                own.write([f"{number} {turns} {row}" for row in range(50)], clustered(50, seed=turns), {})
            elif number < 4:
                assert (own.search(points[turns % 1000][None], 10)[1] > -2).all()
            else:
                own.finish()
        return turns

    with ThreadPoolExecutor(5) as threads:
        turns = list(threads.map(work, range(5)))
    assert min(turns) > 0 and len(store) == 1000 + 50 * (turns[0] + turns[1])
    store.search(points[:1], 1)  # reads the centers, if they are new
    check_lists(store)


def test_programs_add_the_same_column_at_once(postgres, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16) for _ in range(2)]
    stores[0].write(["first"], clustered(1), {})
    refresh, both = Pgvector._refresh, threading.Barrier(2)

    def refresh_together(store: Any) -> None:
        refresh(store)
        with suppress(threading.BrokenBarrierError):  # the second writer may wait for the lock of the first
            both.wait(timeout=1)

    monkeypatch.setattr(Pgvector, "_refresh", refresh_together)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: stores[number].write([f"{number}"], clustered(1), {"row": [number]}), range(2)))
    monkeypatch.undo()
    assert len(stores[0]) == 3


def test_points_of_other_programs_are_found(small: None, postgres, table: str) -> None:
    store, points = filled(postgres.url, table)
    store.finish()
    store._connect().execute(f"INSERT INTO {table} (_id, _vector) VALUES ('new', %s)", [points[5]])
    ids, _ = store.search(points[5:6], 10)
    assert {"new", "5"} <= set(ids[0])


def test_finish_that_was_killed_before_the_table_was_sorted(small: None, postgres, table: str, monkeypatch) -> None:
    store, points = filled(postgres.url, table)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "_sort_points", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.finish()
    large = size_of(store)
    again = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
    assert not again.report and recall_of(again, points) == 1
    again.finish()
    assert again._version == 1 and again.report["settings"] and size_of(again) < 0.7 * large


def size_of(store: Any) -> int:
    return store._connect().execute("SELECT pg_relation_size(%s)", [store.table]).fetchone()[0]


def test_lists_with_too_few_points_are_replaced_by_a_scan(small: None, postgres, table: str, monkeypatch) -> None:
    store, points = filled(postgres.url, table, ", recall=0.3")
    store.finish()
    assert store.report["settings"]["10"]["probes"] <= 8
    monkeypatch.setattr(type(store), "_passing", lambda *_: 1.0)  # 1 in 150 points passes
    assert recall_of(store, points, Comparison("row", "<", 20), slice(20)) == 1


def test_tables_of_centers_of_others_are_left_as_they_are(postgres, table: str) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table}_lists (x int)")
        with pytest.raises(UnimetricError, match=f'there is already a table "{table}_lists"'):
            create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
        assert connection.execute(f"SELECT to_regclass('{table}'), count(*) FROM {table}_lists").fetchall() == [(None, 0)]


def test_finish_does_nothing_if_nothing_has_changed(small: None, postgres, table: str, monkeypatch) -> None:
    store, _ = filled(postgres.url, table)
    store.finish()
    again = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "_tune", lambda *_: pytest.fail("tuned again"))
        store.finish()
        again.finish()
    store.delete(["5"])
    before = dict(store.report)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "_tune", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.finish()
    again.search(clustered(1), 1)
    assert again.report == before  # until the new settings are known, searches use the old ones
    store.finish()
    assert store.report["rows"] == 2999 and store.report["settings"] and store._version == 1


def test_writes_during_the_tuning_are_changes(small: None, postgres, table: str, monkeypatch) -> None:
    store, points = filled(postgres.url, table)
    other = create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
    tune = type(store)._tune

    def write_and_tune(self: Any, rows: int) -> Any:
        other.write(["new"], points[:1], {})
        return tune(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "_tune", write_and_tune)
        store.finish()
    assert store.report["rows"] == 3000
    store.finish()
    assert store.report["rows"] == 3001


def test_passwords_are_in_no_spec_and_in_no_error(postgres, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr@t/pw"
    url = postgres.url.replace("tester@", "tester:s3cr%40t%2Fpw@")
    texts = []
    for text in (f"pgvector(url='{url}')", f"pgvector(url='{url}', recal=1)", f"pgvector(url='host=h password={secret} x', recall=2)"):
        with pytest.raises(UnimetricError) as caught:
            create("stores", text, path="unused", dim=16)
        texts.append(str(caught.value))
    assert "must not have a password" in texts[0] and "$DATABASE_URL" in texts[0]
    monkeypatch.setenv("SHOES_URL", url)
    store = create("stores", f"pgvector(url='$SHOES_URL', table='{table}')", path="unused", dim=16)
    assert len(store) == 0 and bind("stores", "pgvector(url='$SHOES_URL')", dim=16)[1]["url"] == "$SHOES_URL"
    monkeypatch.setenv("SHOES_URL", url.replace(str(postgres.port), "1"))
    with pytest.raises(UnimetricError, match=r"table `unimetric` of 127\.0\.0\.1:1/postgres: .*refused") as caught:
        create("stores", "pgvector(url='$SHOES_URL')", path="unused", dim=16)
    texts.append(str(caught.value))
    monkeypatch.setenv("SHOES_URL", "postgresql://me:s3cr%40t%2Fpw@host/db?nonsense=1")
    with pytest.raises(UnimetricError) as caught:
        create("stores", "pgvector(url='$SHOES_URL')", path="unused", dim=16)
    texts.append(str(caught.value))
    assert not [text for text in texts if "s3cr" in text]
    monkeypatch.delenv("SHOES_URL")
    with pytest.raises(UnimetricError, match="environment variable `SHOES_URL` is not set"):
        create("stores", "pgvector(url='$SHOES_URL')", path="unused", dim=16)


def test_a_server_that_is_down_is_an_error_until_it_is_back(postgres, table: str) -> None:
    store, points = filled(postgres.url, table, count=20)
    postgres.stop()
    try:
        for call in (lambda: store.write(["a"], points[:1], {}), lambda: store.search(points[:1], 3), lambda: len(store), store.finish):
            with pytest.raises(Unavailable, match=f"table `{table}` of 127.0.0.1") as caught:
                call()
            assert "server" in caught.value.hint
    finally:
        postgres.start()
    assert len(store) == 20 and store.search(points[:1], 1)[0][0, 0] == "0"
    postgres.stop()
    postgres.start()
    assert store.search(points[:1], 1)[0][0, 0] == "0"  # the open connection was lost


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        (None, "was not written by Unimetric"),
        ("a table of shoes", "was not written by Unimetric"),
        (json.dumps({"unimetric": {"format": 99, "dim": 16, "report": {}}}), "newer version"),
        (json.dumps({"unimetric": {"format": 1, "dim": 16, "report": {}}}), "older version"),
    ],
)
def test_other_tables_are_rejected_and_left_as_they_are(postgres, table: str, comment: str | None, problem: str) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (x int)")
        connection.execute(f"INSERT INTO {table} VALUES (1)")
        if comment:
            connection.execute(f"COMMENT ON TABLE {table} IS '{comment}'")
        with pytest.raises(UnimetricError, match=problem):
            create("stores", f"pgvector(url='{postgres.url}', table='{table}')", path="unused", dim=16)
        assert connection.execute(f"SELECT * FROM {table}").fetchall() == [(1,)]


def test_tables_are_readable_by_other_programs(postgres, table: str) -> None:
    filled(postgres.url, table, count=5)
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute(f"SELECT _id, row, vector_dims(_vector) FROM {table} ORDER BY row LIMIT 1").fetchall() == [("0", 0, 16)]
