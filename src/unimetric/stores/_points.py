"""Checks of what is written to a store and asked of it, the same for every store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from unimetric.arguments import Count, requirement
from unimetric.errors import NotFound, UnimetricError
from unimetric.stores._where import column_type, is_plain_text

#: Names that stores use themselves.
RESERVED = ("_id", "_vector", "_list")
#: Longest name of a column in bytes, which is that of PostgreSQL.
_NAME = 63
#: Types of columns by name.
TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
#: Largest difference of a vector's length from 1.
_UNIT = 1e-3


def check_points(
    ids: Sequence[str],
    vectors: Float[np.ndarray, "N D"],
    columns: Mapping[str, Sequence[Any]],
    *,
    dim: int,
    held: Mapping[str, type],
) -> tuple[list[str], Float[np.ndarray, "N D"], dict[str, list[Any]], dict[str, type]]:
    """Return the points of a call of `Store.write` in plain types, or raise an error.

    Args:
        ids: Ids of the points.
        vectors: Unit vectors.
        columns: Values by column. numpy scalars become Python values, and nan becomes None.
        dim: Dimension of the store.
        held: Types of the columns that the store has.

    Returns:
        Ids, vectors (float32, contiguous), the values of every column of the store in the order of the ids,
        and the types of these columns. New columns follow the held ones. Columns without any value are new
        only once they have one.
    """
    ids = check_ids(ids)
    if len(set(ids)) < len(ids):
        twice = next(each for each in ids if ids.count(each) > 1)
        raise UnimetricError(f"ids must be unique in a call of `write`, got `{twice}` twice", "write one of them")
    vectors = check_vectors(vectors, dim)
    if len(vectors) != len(ids):
        raise UnimetricError(f"`write` needs one vector per id, got {len(ids)} ids and {len(vectors)} vectors", "pass as many of both")
    types = dict(held)
    values: dict[str, list[Any]] = {name: [None] * len(ids) for name in held}
    for name, given in columns.items():
        check_name(name)
        if len(given) != len(ids):
            raise UnimetricError(f"column `{name}` needs one value per id, got {len(given)} for {len(ids)}", "use None for missing ones")
        plain = [_plain(name, value) for value in given]
        found = column_type(name, plain)
        if found is None:
            continue
        kept = types.setdefault(name, found)
        if kept is not found and (kept, found) != (float, int):
            raise UnimetricError(
                f"column `{name}` holds {kept.__name__}, got {found.__name__}", "write values of one type, or rename the column"
            )
        if kept is float:
            plain = [None if value is None else float(value) for value in plain]
        values[name] = plain
    return list(ids), vectors, values, types


def check_ids(ids: Sequence[str]) -> list[str]:
    """Return ids as a list of str. An empty or invalid id is an error."""
    for each in ids:
        if not isinstance(each, str) or not each or not is_plain_text(each):
            raise UnimetricError(f"an id must be nonempty text of valid Unicode without NUL, got {each!r}", "rename it")
    return [str(each) for each in ids]


def to_matrix(vectors: Any, problem: str, dim: int, hint: str) -> Float[np.ndarray, "N D"]:
    """Return vectors as a matrix of numbers, or raise an error that starts with `problem`."""
    try:
        array = np.asarray(vectors)
        got = f"{array.dtype} {array.shape}"
    except ValueError:
        array, got = np.empty(0), "rows of different lengths"
    if array.ndim != 2 or array.shape[1] != dim or array.dtype.kind not in "biuf":
        raise UnimetricError(f"{problem}, got {got}", hint)
    return array


def check_vectors(vectors: Any, dim: int) -> Float[np.ndarray, "N D"]:
    """Return vectors as contiguous float32. Another length than 1 or dimension is an error."""
    problem = f"vectors must have the shape (N, {dim}) of the store"
    array = np.ascontiguousarray(to_matrix(vectors, problem, dim, "use the model of the index"), dtype=np.float32)
    lengths = np.linalg.norm(array, axis=1)
    wrong = ~(np.abs(lengths - 1) <= _UNIT)  # also true for nan
    if wrong.any():
        raise UnimetricError(f"vectors must have length 1, got {lengths[wrong][0]:.6g} in row {int(wrong.argmax())}", "normalize them")
    return array


def check_queries(queries: Any, k: int, dim: int) -> Float[np.ndarray, "Q D"]:
    """Return the vectors of a search as contiguous float32.

    A wrong vector or number of neighbors is an error.
    """
    check_count(k)
    return check_vectors(queries, dim)


def check_count(k: Any) -> None:
    """Raise an error if a search cannot return this number of neighbors."""
    problem = requirement(Count, k)
    if problem:
        raise UnimetricError(f"`k` must be {problem}, got {k!r}", "use `k=10`")


def check_name(name: str) -> None:
    """Raise an error if a column cannot have this name in every store."""
    if not isinstance(name, str) or not name.strip() or not is_plain_text(name) or len(name.encode()) > _NAME:
        raise UnimetricError(f"the name of a column must be text of 1 to {_NAME} bytes, got {name!r}", "rename the column")
    if name in RESERVED:
        raise UnimetricError(f"`{name}` cannot be the name of a column: stores use it", "rename the column")


def _plain(name: str, value: Any) -> Any:
    """Return a value as a Python object."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, str):
        if not is_plain_text(value):
            raise UnimetricError(f"column `{name}` must hold valid Unicode without NUL, got {value!r}", "remove the character")
        return str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UnimetricError(f"column `{name}` must hold integers of at most 64 bits, got {value}", "store it as text")
    return value


def unknown_id(name: str) -> NotFound:
    """Return the error for an id that a store does not have."""
    return NotFound(f"unknown id `{name}`", "use an id that a search or `scan` has returned")


def no_hits(queries: int, k: int) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
    """Return the result of a search that found nothing, to be filled."""
    return np.full((queries, k), "", dtype=object), np.full((queries, k), -np.inf, dtype=np.float32)
