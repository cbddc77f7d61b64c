"""The page is fresh, and every row names a component and arguments that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from unimetric.spec import find, parse, signature

from .table import comparisons, page

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
ROWS = [comparison for found in comparisons().values() for comparison in found]


def test_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run `python -m tests.parity.table > docs/parity.md`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.theirs}")
def test_row_names_existing_components_and_options(row):
    assert row.flag or row.verdict != "equal with the option"
    for method in row.method.split(", "):
        kind, name = method.split("/")
        taken = signature(find(kind, name)).parameters
        if row.flag:
            assert set(parse(f"{name}({row.flag})").named) <= set(taken)


@pytest.mark.parametrize("kind", ["losses", "miners", "metrics", "samplers", "adapters", "objectives", "heads"])
def test_every_compared_kind_has_rows(kind):
    assert any(row.method.startswith(kind + "/") for row in ROWS)
