"""Filters: a whitelist of comparisons of columns with literals, for every store.

    label = 'boot' and (price < 50 or price is null) and not size in (41, 42) and name like 'red%'

`parse` reads such a text with sqlglot, and everything outside the whitelist is an error. A store receives the
tree, never the text. `mask` applies it to arrays, `to_sql` writes it with bound values, and `to_text` writes
it with literals for systems that cannot bind. The logic is that of SQL: a comparison with a missing value is
neither true nor false, so neither `price = 5` nor `not price = 5` matches a row without a price. Strings
compare by code points and `like` is case-sensitive, on every store.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from unimetric.errors import UnimetricError, closest

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "in", "like", "is null"]
Value = str | int | float | bool

_HINT = "write a filter such as \"label = 'boot' and price < 50\""
_MIRRORED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
#: Parentheses and `not` may be nested this deep, and a text may have this many characters.
_DEPTH, _LENGTH = 100, 20_000


class Where:
    """Filter of rows: `Comparison`, `All`, `AnyOf` or `Not`."""


#: Filter as a search accepts it: text such as `price < 50`, a dictionary such as `{"price": {"<": 50}}`, a tree, or None.
Filter = str | Mapping[str, Any] | Where | None


@dataclass(frozen=True)
class Comparison(Where):
    """Comparison of a column with a value.

    Args:
        column: Name of the column.
        operator: One of `=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `like` and `is null`.
        value: Literal; a tuple of literals for `in`; None for `is null`.
    """

    column: str
    operator: Operator
    value: Value | tuple[Value, ...] | None = None

    def __post_init__(self) -> None:
        if self.operator not in get_args(Operator):
            raise UnimetricError(f"unknown operator `{self.operator}`", closest(str(self.operator), get_args(Operator)))
        if self.operator == "is null":
            if self.value is not None:
                raise UnimetricError(f"`{self.column} is null` has no value, got {self.value!r}", "leave it out")
        elif self.operator == "in":
            if not isinstance(self.value, tuple):
                raise UnimetricError(f"`{self.column} in` needs a tuple of values, got {self.value!r}", "use `=` for one value")
            for value in self.value:
                _check_value(self.column, value)
        else:
            _check_value(self.column, self.value)
        if self.operator == "like" and (not isinstance(self.value, str) or "\\" in self.value):
            raise UnimetricError(
                f"`{self.column} like` needs a pattern without backslashes, got {self.value!r}",
                "use `%` for any text and `_` for a character",
            )


@dataclass(frozen=True)
class All(Where):
    """Rows that all parts match; all rows without parts."""

    parts: tuple[Where, ...]


@dataclass(frozen=True)
class AnyOf(Where):
    """Rows that at least one part matches; no row without parts."""

    parts: tuple[Where, ...]


@dataclass(frozen=True)
class Not(Where):
    """Rows that the part does not match."""

    part: Where


def _check_value(column: str, value: Any) -> None:
    """Reject values that are not finite 64-bit literals that every store can represent."""
    if isinstance(value, str):
        if not is_plain_text(value):
            raise UnimetricError(f"`{column}`: text must be valid Unicode without NUL, got {value!r}", _HINT)
    elif value is None:
        raise UnimetricError(f"`{column}` cannot be compared with null", f"write `{column} is null`")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise UnimetricError(f"`{column}`: an integer must have at most 64 bits, got {value}", _HINT)
    elif not isinstance(value, float) or not math.isfinite(value):
        raise UnimetricError(f"`{column}` must be compared with text, a finite number or a truth value, got {value!r}", _HINT)


def is_plain_text(text: str) -> bool:
    """Return whether a text is valid Unicode without NUL, which databases cannot store.

    >>> is_plain_text("Stiefel"), is_plain_text(chr(0)), is_plain_text(chr(0xDC80))
    (True, False, False)
    """
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


# --- Reading ------------------------------------------------------------------------------------------


def from_dict(conditions: Mapping[str, Any]) -> Where:
    """Return the filter of a dictionary, all of whose entries must match.

    >>> from_dict({"label": "boot"})
    All(parts=(Comparison(column='label', operator='=', value='boot'),))

    Args:
        conditions: For each column a value, None for rows without one, a list of values, or a dictionary of
            operators and values, such as `{"price": {">=": 10, "<": 50}}`.
    """
    parts: list[Where] = []
    for column, value in conditions.items():
        if value is None:
            parts.append(Comparison(column, "is null"))
        elif isinstance(value, Mapping):
            parts += [Comparison(column, operator, _unboxed(each)) for operator, each in value.items()]
        else:
            parts.append(Comparison(column, "in" if isinstance(value, list | tuple | set) else "=", _unboxed(value)))
    return All(tuple(parts))


def _unboxed(value: Any) -> Any:
    """Return a numpy scalar as a Python value, and a list as a tuple."""
    if isinstance(value, list | tuple | set):
        return tuple(_unboxed(each) for each in value)
    return value.item() if isinstance(value, np.generic) else value


def parse(text: str, columns: Mapping[str, type]) -> Where:
    """Read a filter from a text.

    Args:
        text: Condition in SQL. Only comparisons of columns with literals, `and`, `or` and `not` are allowed.
        columns: Types of the columns: `str`, `int`, `float` or `bool`.

    Raises:
        UnimetricError: The text does not parse, has something else, or names an unknown column.
    """
    try:
        import sqlglot
    except ImportError:
        raise UnimetricError("a filter in words needs sqlglot", "pip install 'unimetric[index]'") from None
    if len(text) > _LENGTH or text.count("(") > _DEPTH:
        raise UnimetricError(f"a filter must have at most {_LENGTH} characters and {_DEPTH} parentheses", _HINT)
    try:
        statements = sqlglot.parse(text)
    except (sqlglot.errors.SqlglotError, RecursionError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        hint = "close all quotes, and double those in text: `label = 'O''Brien'`" if text.count("'") % 2 else _HINT
        raise UnimetricError(f"cannot read the filter `{text[:200]}`", hint) from None
    if len(statements) != 1 or statements[0] is None:
        raise UnimetricError(f"a filter must be one condition, got `{text[:200]}`", _HINT)
    try:
        where = _read(statements[0])
    except RecursionError:
        raise UnimetricError("the filter is nested too deeply", "use `in (...)` for many values") from None
    return check(where, columns)


#: Arguments of sqlglot's nodes that `_read` uses. Any other argument changes the meaning, so it is rejected.
_READ = {
    "And": {"this", "expression"},
    "Or": {"this", "expression"},
    "Not": {"this"},
    "Paren": {"this"},
    "Column": {"this"},
    "Identifier": {"this", "quoted"},
    "Literal": {"this", "is_string"},
    "Boolean": {"this"},
    "Null": set(),
    "Neg": {"this"},
    "EQ": {"this", "expression"},
    "NEQ": {"this", "expression"},
    "LT": {"this", "expression"},
    "LTE": {"this", "expression"},
    "GT": {"this", "expression"},
    "GTE": {"this", "expression"},
    "Like": {"this", "expression", "negate"},
    "In": {"this", "expressions"},
    "Between": {"this", "low", "high"},
    "Is": {"this", "expression"},
}
_COMPARISONS: dict[str, Operator] = {"EQ": "=", "NEQ": "!=", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">="}


def _name(node: Any) -> str:
    """Return the type of a node of sqlglot. An argument that `_read` ignores is an error."""
    name = type(node).__name__
    used = {key for key, value in node.args.items() if value not in (None, False, [])}
    if name not in _READ or used - _READ[name]:
        _reject(node)
    return name


def _reject(node: Any) -> NoReturn:
    raise UnimetricError(
        f"`{node.sql()[:200]}` is not allowed in a filter", "compare columns with literals: = != < <= > >= in, like, is null"
    )


def _read(node: Any) -> Where:
    """Convert a node of sqlglot."""
    name = _name(node)
    if name in ("And", "Or"):
        parts = tuple(_read(each) for each in node.flatten())  # a chain of `or` is one node, however long
        return All(parts) if name == "And" else AnyOf(parts)
    if name == "Not":
        return Not(_read(node.this))
    if name == "Paren":
        return _read(node.this)
    if name == "Column":  # a truth value by itself
        return Comparison(_column(node), "=", True)
    if name in _COMPARISONS:
        operator = _COMPARISONS[name]
        if _name(node.this) == "Column":
            return Comparison(_column(node.this), operator, _value(node.expression))
        return Comparison(_column(node.expression), _MIRRORED[operator], _value(node.this))  # type: ignore[arg-type]
    if name == "In":
        return Comparison(_column(node.this), "in", tuple(_value(each) for each in node.expressions))
    if name == "Like":
        where = Comparison(_column(node.this), "like", _value(node.expression))
        return Not(where) if node.args.get("negate") else where
    if name == "Between":
        column = _column(node.this)
        return All((Comparison(column, ">=", _value(node.args["low"])), Comparison(column, "<=", _value(node.args["high"]))))
    if name == "Is" and _name(node.expression) == "Null":
        return Comparison(_column(node.this), "is null")
    _reject(node)


def _column(node: Any) -> str:
    if _name(node) != "Column":
        _reject(node)
    _name(node.this)
    return str(node.name)


def _value(node: Any) -> Any:
    """Return the Python value of a literal."""
    name = _name(node)
    if name == "Paren":
        return _value(node.this)
    if name == "Boolean":
        return bool(node.this)
    if name == "Null":
        return None
    if name == "Neg" and _name(node.this) == "Literal" and not node.this.is_string:
        return -_value(node.this)
    if name == "Column":
        text = node.name[:200].replace("'", "''")
        raise UnimetricError(f"`{node.sql()[:200]}` is a column, not a value", f"write text in single quotes: `'{text}'`")
    if name != "Literal":
        _reject(node)
    if node.is_string:
        return str(node.this)
    try:
        return int(node.this) if re.fullmatch(r"[0-9]+", node.this) else float(node.this)
    except ValueError:  # such as `0E`, or an integer of more than 4,300 digits
        raise UnimetricError(f"`{node.this[:200]}` is not a number", "write a number such as 50 or 1.5e3") from None


def read_filter(where: Filter, columns: Mapping[str, type]) -> Where | None:
    """Return a checked filter, or None for an empty one.

    Args:
        where: Text such as `label = 'boot' and price < 50`, a dictionary such as `{"label": "boot"}`, a tree, or None.
        columns: Types of the columns: `str`, `int`, `float` or `bool`.

    Raises:
        UnimetricError: The filter cannot be read, names an unknown column, or compares it with a value of another type.
    """
    if where is None or (isinstance(where, str) and not where.strip()):
        return None
    if isinstance(where, str):
        return parse(where, columns)
    if isinstance(where, Mapping):
        where = from_dict(where)
    if not isinstance(where, Where):
        raise UnimetricError(f"a filter must be text or a dictionary, got {type(where).__name__}", _HINT)
    return check(where, columns)


def check(where: Where, columns: Mapping[str, type]) -> Where:
    """Return a filter in which columns of integers are compared with integers only.

    Args:
        where: Filter.
        columns: Types of the columns: `str`, `int`, `float` or `bool`.

    Raises:
        UnimetricError: The filter names an unknown column, or compares it with a value of another type.
    """
    if isinstance(where, Not):
        return Not(check(where.part, columns))
    if isinstance(where, All | AnyOf):
        return type(where)(tuple(check(part, columns) for part in where.parts))
    assert isinstance(where, Comparison)
    if where.column not in columns:
        raise UnimetricError(f"unknown column `{where.column}`", closest(str(where.column), columns) or "this index has no columns")
    held = columns[where.column]
    values = where.value if isinstance(where.value, tuple) else (where.value,)
    for value in values if where.operator != "is null" else ():
        fits = isinstance(value, held) if held in (str, bool) else isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or (where.operator == "like" and held is not str):
            raise UnimetricError(f"`{where.column}` holds {_TYPES[held]}, got {value!r}", _EXAMPLES[held].format(where.column))
    return _whole(where) if held is int and any(isinstance(value, float) for value in values) else where


def _whole(part: Comparison) -> Where:
    """Return a comparison of integers with a fraction as one with integers.

    Databases compare those exactly. A comparison that no integer fulfills is false for an integer, and remains unknown for a missing value.
    """
    most = Comparison(part.column, "<=", 2**63 - 1)
    if part.operator == "in":
        assert isinstance(part.value, tuple)
        kept = tuple(int(value) for value in part.value if value == int(value) and -(2**63) <= value < 2**63)
        return Comparison(part.column, "in", kept) if kept else Not(most)
    assert isinstance(part.value, float)
    floor = math.floor(part.value)
    if -(2**63) <= floor < 2**63:
        if floor == part.value:
            return Comparison(part.column, part.operator, floor)
        below: Where = Comparison(part.column, "<=", floor)
    else:
        below = most if floor > 0 else Not(most)
    if part.operator in ("<", "<="):
        return below
    if part.operator in (">", ">="):
        return Not(below)
    return Not(most) if part.operator == "=" else most


_TYPES = {str: "text", int: "integers", float: "numbers", bool: "truth values"}
_EXAMPLES = {str: "write `{} = 'text'`", int: "write `{} = 5`", float: "write `{} < 5.0`", bool: "write `{} = true`"}


def comparisons(where: Where) -> list[Comparison]:
    """Return all comparisons of a filter, in order."""
    if isinstance(where, Comparison):
        return [where]
    if isinstance(where, Not):
        return comparisons(where.part)
    assert isinstance(where, All | AnyOf)
    return [each for part in where.parts for each in comparisons(part)]


# --- Arrays -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Coded:
    """Column of few distinct values, which are compared once each.

    Args:
        values: Distinct values, with None for a missing one.
        codes: (N,) position in `values` of each row.
    """

    values: Sequence[Value | None]
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)


def mask(where: Where, columns: Mapping[str, Any]) -> np.ndarray:
    """Return which rows match, as an array of truth values.

    >>> mask(from_dict({"price": {"<": 50}}), {"price": [10, None, 90]}).tolist()
    [True, False, False]

    Args:
        where: Filter.
        columns: Values by column: numpy arrays, masked arrays whose masked values are missing, `Coded`, or
            sequences with None for missing values. All have the same length.
    """
    used = {part.column for part in comparisons(where)} & set(columns)
    rows = len(next(iter(columns.values()))) if columns else 0
    return _evaluate(check(where, {name: column_type(name, columns[name]) or str for name in used}), columns, rows)[0]


def _evaluate(where: Where, columns: Mapping[str, Any], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where a filter is true and where it is false. Elsewhere it is unknown."""
    if isinstance(where, Comparison):
        return _compare(where, columns[where.column])
    if isinstance(where, Not):
        true, false = _evaluate(where.part, columns, rows)
        return false, true
    assert isinstance(where, All | AnyOf)
    found = [_evaluate(part, columns, rows) for part in where.parts]
    every = np.ones(rows, bool)
    for_all, for_any = (0, 1) if isinstance(where, All) else (1, 0)
    both = functools.reduce(np.logical_and, (each[for_all] for each in found), every)
    either = functools.reduce(np.logical_or, (each[for_any] for each in found), ~every)
    return (both, either) if isinstance(where, All) else (either, both)


def _compare(part: Comparison, column: Any) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(column, Coded):
        true, false = _compare(part, column.values)
        return true[column.codes], false[column.codes]
    values, known = as_array(column)
    if part.operator == "is null":
        return ~known, known
    if part.operator == "in":
        assert isinstance(part.value, tuple)
        true = functools.reduce(np.logical_or, (values == each for each in part.value), np.zeros(len(values), bool))
        return (true & known, ~true & known) if part.value else (true, ~true)
    if part.operator == "like":
        distinct, places = np.unique(values, return_inverse=True)
        pattern = _pattern(str(part.value))
        true = np.array([pattern.fullmatch(str(each)) is not None for each in distinct], bool)[places]
    else:
        true = np.asarray(_NUMPY[part.operator](values, part.value), bool)
    return true & known, ~true & known


_NUMPY: dict[str, Callable[..., Any]] = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


def _pattern(like: str) -> re.Pattern[str]:
    first, *rest = ("".join("." if character == "_" else re.escape(character) for character in part) for part in like.split("%"))
    # The first match of a part is as good as any later one, so these groups never try another: the time stays polynomial.
    middle = "".join(f"(?>.*?{part})" for part in rest[:-1] if part)
    return re.compile(first + middle + (f".*{rest[-1]}" if rest else ""), re.DOTALL)


def as_array(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a column as a typed array, and which of them are not missing."""
    if isinstance(column, np.ma.MaskedArray):
        return np.asarray(column.data), ~np.ma.getmaskarray(column)
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufUT":
        return column, np.ones(len(column), bool) if column.dtype.kind != "f" else ~np.isnan(column)
    known = np.array([value is not None for value in column], bool)
    held = column_type("", column) or str
    values = np.array([held() if value is None else value for value in column], {str: None, float: float, int: np.int64, bool: bool}[held])
    return (values if len(values) else np.empty(0, "U1" if held is str else held)), known


def column_type(name: str, values: Any) -> type | None:
    """Return the type of a column: str, int, float or bool. None if all values are missing.

    Args:
        name: Name of the column, for the error.
        values: numpy array, masked array, or sequence with None for missing values.

    Raises:
        UnimetricError: The values have different types or another type. Integers and numbers are numbers.
    """
    if isinstance(values, Coded):
        return column_type(name, values.values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufUT":
        return {"b": bool, "i": int, "u": int, "f": float}.get(values.dtype.kind, str)
    found = {type(value.item() if isinstance(value, np.generic) else value) for value in values if value is not None}
    if found == {int, float}:
        return float
    if len(found) > 1 or found - set(_TYPES):
        raise UnimetricError(
            f"column `{name}` must hold values of one type, got {', '.join(sorted(each.__name__ for each in found))}",
            "use text, integers, numbers or truth values, and None for missing ones",
        )
    return next(iter(found), None)


# --- SQL ----------------------------------------------------------------------------------------------


def to_sql(where: Where, placeholder: str = "%s") -> tuple[str, list[Value]]:
    """Return a filter as SQL with placeholders, and the values to bind.

    >>> to_sql(from_dict({"label": "boot"}))
    ('("label" = %s)', ['boot'])

    Args:
        where: Filter whose columns were checked.
        placeholder: Placeholder of a value. A percent sign in a name is doubled if it is `%s`, as psycopg requires.
    """
    values: list[Value] = []

    def bind(value: Value) -> str:
        values.append(value)
        return placeholder

    def column(name: str) -> str:
        quoted = quote_name(name)
        return quoted.replace("%", "%%") if placeholder == "%s" else quoted

    return to_text(where, column=column, literal=bind), values


def quote_name(name: str) -> str:
    """Return the name of a column in double quotes, for SQL.

    >>> quote_name('5" nails')
    '"5"" nails"'
    """
    if not is_plain_text(name) or not name:
        raise UnimetricError(f"a column needs a name of valid Unicode without NUL, got {name!r}", "rename the column")
    return '"' + name.replace('"', '""') + '"'


def to_text(where: Where, *, column: Callable[[str], str], literal: Callable[[Any], str]) -> str:
    """Return a filter as SQL.

    Args:
        where: Filter whose columns were checked.
        column: Function that quotes the name of a column.
        literal: Function that quotes or binds a value.
    """
    if isinstance(where, Not):
        return f"(NOT {to_text(where.part, column=column, literal=literal)})"
    if isinstance(where, All | AnyOf):
        word, empty = (" AND ", "(1 = 1)") if isinstance(where, All) else (" OR ", "(1 = 0)")
        parts = [to_text(part, column=column, literal=literal) for part in where.parts]
        return parts[0] if len(parts) == 1 else f"({word.join(parts)})" if parts else empty
    assert isinstance(where, Comparison)
    name = column(where.column)
    if where.operator == "is null":
        return f"({name} IS NULL)"
    if where.operator == "in":
        assert isinstance(where.value, tuple)
        return f"({name} IN ({', '.join(literal(value) for value in where.value)}))" if where.value else "(1 = 0)"
    return f"({name} {where.operator.upper()} {literal(where.value)})"
