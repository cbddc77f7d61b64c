"""Checks of points before a store writes them."""

from __future__ import annotations

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.stores._points import check_points

UNIT = np.eye(3, dtype=np.float32)


def test_points_become_plain_values_of_every_column() -> None:
    columns = {"price": np.array([1, 2, 3]), "note": [None, None, None], "size": [1.0, float("nan"), np.float32(2)]}
    ids, vectors, values, types = check_points(np.array(["a", "b", "c"]), np.eye(3), columns, dim=3, held={"label": str, "price": float})
    assert ids == ["a", "b", "c"] and type(ids[0]) is str and vectors.dtype == np.float32
    assert values == {"label": [None] * 3, "price": [1.0, 2.0, 3.0], "size": [1.0, None, 2.0]}
    assert types == {"label": str, "price": float, "size": float} and type(values["price"][0]) is float


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ids": ["a", "b", "a"]}, "`a` twice"),
        ({"ids": ["a", "", "c"]}, "nonempty"),
        ({"ids": ["a", "\udc80", "c"]}, "valid Unicode"),
        ({"ids": ["a", 2, "c"]}, "got 2"),
        ({"ids": ["a", "b"]}, "2 ids and 3 vectors"),
        ({"vectors": np.eye(3, 4)}, r"\(N, 3\)"),
        ({"vectors": [[1, 0, 0], [0, 1], [0, 0, 1]]}, r"\(N, 3\) of the store, got rows of different lengths"),
        ({"vectors": [["a", "b", "c"]] * 3}, r"\(N, 3\) of the store, got <U1"),
        ({"vectors": 2 * UNIT}, "length 1, got 2 in row 0"),
        ({"vectors": UNIT * [[1], [np.nan], [1]]}, "length 1, got nan in row 1"),
        ({"columns": {"a": [1, 2]}}, "one value per id"),
        ({"columns": {"a": [1, "2", 3]}}, "one type, got int, str"),
        ({"columns": {"a": [1, True, 3]}}, "one type, got bool, int"),
        ({"columns": {"a": [[], [], []]}}, "one type, got list"),
        ({"columns": {"a": [2**63, 0, 0]}}, "64 bits"),
        ({"columns": {"a": ["x\0", "", ""]}}, "valid Unicode"),
        ({"columns": {"size": [1.5, 2.0, 3.0]}}, "`size` holds int, got float"),
        ({"columns": {"_id": [1, 2, 3]}}, "`_id` cannot be"),
        ({"columns": {"": [1, 2, 3]}}, "1 to 63 bytes"),
        ({"columns": {"ä" * 32: [1, 2, 3]}}, "1 to 63 bytes"),
    ],
)
def test_wrong_points_are_rejected(changes: dict, problem: str) -> None:
    given = {"ids": ["a", "b", "c"], "vectors": UNIT, "columns": {}} | changes
    with pytest.raises(UnimetricError, match=problem):
        check_points(given["ids"], given["vectors"], given["columns"], dim=3, held={"size": int})
