"""Filters: what is read, what is rejected, and that arrays and SQL agree."""

from __future__ import annotations

import re
import sqlite3
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unimetric.errors import UnimetricError
from unimetric.stores._where import All, AnyOf, Comparison, Not, Where, check, from_dict, mask, parse, to_sql

TYPES = {"label": str, "price": float, "size": int, "known": bool, "größe": int, 'say "x" %s': int}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("label='boot' and price < 50", All((Comparison("label", "=", "boot"), Comparison("price", "<", 50)))),
        ("label = 'o''brien'", Comparison("label", "=", "o'brien")),
        ("50 > price", Comparison("price", "<", 50)),
        ("price <= -1.5e3", Comparison("price", "<=", -1500.0)),
        ("size in (41, 42) or größe <> 3", AnyOf((Comparison("size", "in", (41, 42)), Comparison("größe", "!=", 3)))),
        ("size not in (41)", Not(Comparison("size", "in", (41,)))),
        ("label not like 'a%'", Not(Comparison("label", "like", "a%"))),
        ("not (label like 'a%')", Not(Comparison("label", "like", "a%"))),
        ("price between 1 and 2", All((Comparison("price", ">=", 1), Comparison("price", "<=", 2)))),
        ("price not between 1 and 2", Not(All((Comparison("price", ">=", 1), Comparison("price", "<=", 2))))),
        ("label is not null", Not(Comparison("label", "is null"))),
        ("known and not known", All((Comparison("known", "=", True), Not(Comparison("known", "=", True))))),
        ("known = false", Comparison("known", "=", False)),
        ('"say ""x"" %s" = 1', Comparison('say "x" %s', "=", 1)),
        ("label = 'boot' -- comment", Comparison("label", "=", "boot")),
    ],
)
def test_parse_reads_the_whitelist(text: str, where: Where) -> None:
    assert parse(text, TYPES) == where


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "one condition"),
        ("label = 'a'; drop table points", "one condition"),
        ("label = 'a' union select 1", "not allowed"),
        ("size in (select 1)", "not allowed"),
        ("size = (select 1)", "not allowed"),
        ("lower(label) = 'a'", "not allowed"),
        ("size + 1 = 2", "not allowed"),
        ("size = 1 + 1", "not allowed"),
        ("label ilike 'a'", "not allowed"),
        ("label like 'a' escape '!'", "not allowed"),
        ("points.label = 'a'", "not allowed"),
        ("case when known then known end", "not allowed"),
        ("size is distinct from 3", "not allowed"),
        ("known is true", "not allowed"),
        ("size::text = '3'", "not allowed"),
        ("size = ?", "not allowed"),
        ("true", "not allowed"),
        ("1 = 1", "not allowed"),
        ("label = 'a", "cannot read"),
        ("label ==== 'a'", "cannot read"),
        ("(" * 90 + "label", "cannot read"),
        ("(" * 5000 + "label", "at most"),
        ("label = 'a' or " * 5000, "at most"),
        ('label = "boot"', "is a column, not a value"),
        ("label = size", "is a column, not a value"),
        ("size = null", "cannot be compared with null"),
        ("size = 9223372036854775808", "at most 64 bits"),
        ("price < 1e999", "finite number"),
        ("label like 'a\\%'", "without backslashes"),
        ("label = 'a\0'", ""),
        ("Label = 'a'", "unknown column `Label`"),
        ("label = 3", "`label` holds text, got 3"),
        ("size = '3'", "`size` holds integers"),
        ("size = true", "`size` holds integers"),
        ("known = 1", "`known` holds truth values"),
        ("price like 'a'", "`price` holds numbers"),
        ("label and size = 1", "`label` holds text, got True"),
        ("price < 0E", "`0E` is not a number"),
    ],
)
def test_parse_rejects_everything_else(text: str, problem: str) -> None:
    with pytest.raises(UnimetricError) as caught:
        parse(text, TYPES)
    assert problem in caught.value.message and caught.value.hint and len(str(caught.value)) < 700


@pytest.mark.parametrize("text", ['label = "O\'Brien"', "label = `O'Brien`", "label = O'Brien", "label = 'O'Brien'"])
def test_hint_doubles_quotes_in_text(text: str) -> None:
    with pytest.raises(UnimetricError) as caught:
        parse(text, TYPES)
    found = re.search(r"'O.*'", caught.value.hint)
    assert found and parse(f"label = {found[0]}", TYPES) == Comparison("label", "=", "O'Brien")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="label=size'\"()<>!-;*/ andornt0123%_", max_size=60))
def test_parse_returns_a_filter_or_an_error(text: str) -> None:
    try:
        where = parse(text, TYPES)
    except UnimetricError:
        return
    check(where, TYPES)
    assert re.fullmatch(r'([()=<>!, ]|%s|AND|OR|NOT|IN|LIKE|IS NULL|"(label|price|size|known|größe)"|"say ""x"" %%s")*', to_sql(where)[0])


def test_parse_without_sqlglot_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    with pytest.raises(UnimetricError) as caught:
        parse("size = 1", TYPES)
    assert "unimetric[index]" in caught.value.hint


def test_dictionaries_are_filters() -> None:
    assert from_dict({"label": "boot", "size": [41, np.int64(42)], "price": {">=": 10, "<": 50.0}, "known": None}) == All(
        (
            Comparison("label", "=", "boot"),
            Comparison("size", "in", (41, 42)),
            Comparison("price", ">=", 10),
            Comparison("price", "<", 50.0),
            Comparison("known", "is null"),
        )
    )
    for wrong in ({"label": b"x"}, {"price": {"~": 1}}, {"price": float("nan")}, {"price": {"in": 3}}, {"label": {"is null": 1}}):
        with pytest.raises(UnimetricError):
            from_dict(wrong)
    with pytest.raises(UnimetricError, match="unknown column `5`"):
        check(from_dict({5: 1}), TYPES)
    with pytest.raises(UnimetricError, match="unknown column `lable`"):
        mask(from_dict({"lable": "boot"}), {"label": ["boot"]})


# --- Arrays and SQL agree ------------------------------------------------------------------------------

ROWS = {
    "label": ["a", "A", "b%", "b_", None, "ä\n", "", "zz", "x'y", "😀"],
    "price": [1.5, None, -2.0, 50.0, 50.5, 0.0, 1e300, None, 3.0, 2.0],
    "size": [1, 2, None, 41, 42, -(2**63), 2**63 - 1, 0, None, 3],
    "known": [True, False, None, True, False, None, True, False, True, None],
}
texts = st.sampled_from(["a", "A", "b%", "_", "%", "b_", "ä%", "", "x'y", "z_", "😀", "_\n", "%b%_", "_%%y", "%_%'%"])
numbers = st.sampled_from([-2, 0, -0.5, 1.5, 3.0, 41, 42, 50.0, 2**63 - 1, 1e19, -1e19, 9223372036854775807.0])
order = st.sampled_from(["=", "!=", "<", "<=", ">", ">="])
leaves = st.one_of(
    st.builds(Comparison, st.just("label"), order, texts),
    st.builds(Comparison, st.just("label"), st.just("like"), texts),
    st.builds(Comparison, st.just("label"), st.just("in"), st.lists(texts, max_size=3).map(tuple)),
    st.builds(Comparison, st.sampled_from(["price", "size"]), order, numbers),
    st.builds(Comparison, st.just("size"), st.just("in"), st.lists(numbers, max_size=3).map(tuple)),
    st.builds(Comparison, st.just("known"), st.sampled_from(["=", "!="]), st.booleans()),
    st.builds(Comparison, st.sampled_from(list(ROWS)), st.just("is null")),
)
filters = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(All, st.lists(inner, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Not, inner),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def database():
    connection = sqlite3.connect(":memory:")
    connection.execute("pragma case_sensitive_like = on")
    connection.execute('create table points (label text, price real, size integer, known integer, "row" integer)')
    rows = zip(*ROWS.values(), range(10), strict=True)
    connection.executemany("insert into points values (?, ?, ?, ?, ?)", list(rows))
    yield connection
    connection.close()


@settings(max_examples=300, deadline=None)
@given(where=filters)
def test_mask_matches_the_rows_that_a_database_does(database, where: Where) -> None:
    text, values = to_sql(check(where, TYPES), "?")
    found = {row for (row,) in database.execute(f'select "row" from points where {text}', values)}
    assert set(np.flatnonzero(mask(where, ROWS)).tolist()) == found
    text, values = to_sql(where, "?")  # SQLite compares integers with fractions exactly
    assert {row for (row,) in database.execute(f'select "row" from points where {text}', values)} == found


def test_time_of_a_pattern_does_not_grow_exponentially() -> None:
    begun = time.process_time()
    assert mask(Comparison("label", "like", 20 * "%_" + "%b"), {"label": ["a" * 200, "a" * 200 + "b"]}).tolist() == [False, True]
    assert time.process_time() - begun < 5


def test_mask_accepts_typed_and_masked_arrays() -> None:
    typed = {name: np.array([value for value in ROWS[name] if value is not None]) for name in ROWS}
    assert mask(Comparison("size", ">", 40), {"size": typed["size"]}).sum() == 3
    hidden = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    assert mask(Not(Comparison("size", "=", 1)), {"size": hidden}).tolist() == [False, False, True]
    assert mask(Comparison("price", "is null"), {"price": np.array([1.0, np.nan])}).tolist() == [False, True]
    assert (
        mask(from_dict({}), {"size": [1, 2]}).tolist() == [True, True] and mask(from_dict({"a": 1}), {"a": np.empty(0, int)}).tolist() == []
    )


def test_sql_quotes_names_and_binds_values() -> None:
    evil = '"; drop table points; --'
    text, values = to_sql(Comparison(evil, "=", evil))
    assert (text, values) == ('("""; drop table points; --" = %s)', [evil])
    assert to_sql(Comparison("100% wool", "=", "50%"))[0] == '("100%% wool" = %s)'
    with pytest.raises(UnimetricError, match="needs a name"):
        to_sql(Comparison("a\0b", "=", 1))
