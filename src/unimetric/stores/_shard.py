"""One file of points: vectors, ids and columns, memory-mapped.

The layout is that of safetensors, which holds no code: the length of a header, the header (JSON) with the type, shape
and bytes of every array, then the arrays. It is written here, not by the safetensors package, because that package
needs all arrays in memory, and vectors are streamed.

N rows, D dimensions.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.errors import DAMAGED_INDEX, UnimetricError
from unimetric.files import atomic_stream
from unimetric.stores._points import TYPES
from unimetric.stores._where import Coded

_NAMES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U32": "u4", "U16": "u2", "U8": "u1"}


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], streamed: Mapping[str, tuple[Any, Iterable[np.ndarray]]], notes: str
) -> None:
    """Write arrays to a file that appears only when it is complete and on disk.

    Args:
        path: File.
        arrays: Arrays by name.
        streamed: For each further array, its type and shape as an empty array would have them, and its parts.
        notes: Text in the header.
    """
    letters = {code: name for name, code in _NAMES.items()}
    header: dict[str, Any] = {"__metadata__": {"notes": notes}}
    shapes = {name: (like.dtype, like.shape) for name, (like, _) in streamed.items()} | {
        name: (array.dtype, array.shape) for name, array in arrays.items()
    }
    order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)  # large types first, so that all are aligned
    start = 0
    for name in order:
        kind, shape = shapes[name]
        end = start + kind.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": letters[kind.str[1:]], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data starts at a multiple of 64 bytes
    try:
        with atomic_stream(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for part in streamed[name][1] if name in streamed else (arrays[name],):
                    file.write(np.ascontiguousarray(part).data.cast("B") if part.size else b"")
    except UnimetricError as error:
        raise UnimetricError(error.message, "free some space, or use another folder") from None


def map_arrays(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Map the arrays of a file into memory, and return its notes."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < size:
                raise ValueError("it is truncated")
            header = json.loads(file.read(length))
        notes = header.pop("__metadata__")["notes"]
        end = 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0)
        if end != size:
            raise ValueError(f"it must have {end:,} bytes, got {size:,}")
        found = {}
        # Private pages: torch requires memory that may be written to, and nothing of it reaches the file.
        whole = np.memmap(path, np.uint8, "c")
        for name, each in header.items():
            first, last = (8 + length + offset for offset in each["data_offsets"])
            found[name] = whole[first:last].view(np.ndarray).view(f"<{_NAMES[each['dtype']]}").reshape(each["shape"])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnimetricError(f"{path}: cannot be read: {error}", DAMAGED_INDEX) from None
    return found, notes


def pack_text(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of some words, and where each word ends."""
    encoded = [word.encode() for word in words]
    ends = np.cumsum([len(word) for word in encoded], dtype=np.int64)
    if len(ends) and ends[-1] >= 2**32:
        raise UnimetricError("the ids or texts of one call of `write` exceed 4 GiB", "write fewer points at a time")
    return np.frombuffer(b"".join(encoded), np.uint8), ends.astype(np.uint32)


def hash_ids(ids: Iterable[str]) -> np.ndarray:
    """Return a number of 32 bits for each id. Different ids may share one."""
    return np.fromiter((zlib.crc32(each.encode()) for each in ids), np.uint32)


def _smallest(values: np.ndarray) -> np.ndarray:
    """Return integers in the smallest signed type that holds them."""
    for kind in (np.int8, np.int16, np.int32):
        if len(values) and np.iinfo(kind).min <= values.min() and values.max() <= np.iinfo(kind).max:
            return values.astype(kind)
    return values.astype(np.int64)


def pack_column(name: str, values: Sequence[Any], kind: type) -> dict[str, np.ndarray]:
    """Return the arrays of a column.

    Texts are stored once each, with one code per row; code 0 is a missing value.
    """
    if kind is str:
        distinct = sorted({value for value in values if value is not None})
        code = {value: number for number, value in enumerate(distinct, 1)} | {None: 0}
        small = next(each for each in (np.uint8, np.uint16, np.uint32) if len(distinct) <= np.iinfo(each).max)
        letters, ends = pack_text(distinct)
        return {name: np.array([code[value] for value in values], small), f"{name}.text": letters, f"{name}.ends": ends}
    known = np.array([value is not None for value in values], np.uint8)
    numbers = np.array([kind() if value is None else value for value in values], {int: np.int64, float: np.float64, bool: np.uint8}[kind])
    found = {name: _smallest(numbers) if kind is int else numbers}
    return found if known.all() else found | {f"{name}.known": known}


class Shard:
    """Points in one file.

    Args:
        path: File.
        dead: (N,) bool mask of the rows that were deleted or replaced, or None.
    """

    def __init__(self, path: Path, dead: np.ndarray | None = None) -> None:
        self.path, self.dead = path, dead
        self._decoded: dict[str, list[str | None]] = {}  # distinct texts by column
        self.arrays, notes = map_arrays(path)
        try:
            self.kinds = {str(name): TYPES[kind] for name, kind in json.loads(notes)["columns"].items()}
            self.rows = len(self.arrays["vectors"])
            if not len(self.arrays["hash"]) == len(self.arrays["ends"]) == self.rows:
                raise ValueError("its arrays have different lengths")
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UnimetricError(f"{path}: is not a file of points: {error}", DAMAGED_INDEX) from None

    @staticmethod
    def write(
        path: Path,
        ids: Sequence[str],
        vectors: tuple[np.ndarray, Iterable[np.ndarray]],
        columns: Mapping[str, Sequence[Any]],
        kinds: Mapping[str, type],
        further: Mapping[str, np.ndarray],
    ) -> None:
        """Write points to a file.

        Args:
            path: File.
            ids: One id per row.
            vectors: An array with the type and shape of all vectors, and their parts.
            columns: Values by column.
            kinds: Type of each column.
            further: Further arrays, such as the vectors in eight bits.
        """
        letters, ends = pack_text(ids)
        arrays = {"ids": letters, "ends": ends, "hash": hash_ids(ids), **further}
        for number, name in enumerate(kinds):
            arrays |= pack_column(f"column{number}", columns[name], kinds[name])
        notes = json.dumps({"columns": {name: kind.__name__ for name, kind in kinds.items()}}, ensure_ascii=False)
        write_arrays(path, arrays, {"vectors": vectors}, notes)

    @property
    def vectors(self) -> np.ndarray:
        """(N, D) vectors, memory-mapped."""
        return self.arrays["vectors"]

    @property
    def live(self) -> int:
        """Number of rows that are not dead."""
        return self.rows - (0 if self.dead is None else int(self.dead.sum()))

    def live_rows(self) -> np.ndarray:
        """Return the rows that are not dead."""
        return np.arange(self.rows) if self.dead is None else np.flatnonzero(~self.dead)

    def id(self, row: int) -> str:
        """Return the id of a row."""
        ends = self.arrays["ends"]
        return self.arrays["ids"][int(ends[row - 1]) if row else 0 : int(ends[row])].tobytes().decode()

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.arrays["hash"], kind="stable").astype(np.uint32)
        return self.arrays["hash"][order], order

    def find(self, ids: Sequence[str], hashes: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the number of each id that is in a row that is not dead, and that row."""
        values, order = self._sorted
        first, last = np.searchsorted(values, hashes), np.searchsorted(values, hashes, "right")
        for number in np.flatnonzero(last > first).tolist():
            for row in order[first[number] : last[number]].tolist():
                if (self.dead is None or not self.dead[row]) and self.id(row) == ids[number]:
                    yield number, row

    def column(self, name: str, kind: type) -> Any:
        """Return a column as `stores._where.mask` reads it.

        A column that the file lacks is missing everywhere.

        Args:
            name: Name of the column.
            kind: Type of the column in the store.
        """
        if name not in self.kinds:
            return np.ma.masked_all(self.rows, {str: "U1", int: np.int64, float: np.float64, bool: bool}[kind])
        key = f"column{list(self.kinds).index(name)}"
        if kind is str:
            if key not in self._decoded:
                self._decoded[key] = self._texts(key)
            return Coded(self._decoded[key], self.arrays[key])
        numbers = self.arrays[key].astype(bool) if kind is bool else self.arrays[key]
        known = self.arrays.get(f"{key}.known")
        return numbers if known is None else np.ma.MaskedArray(numbers, known == 0)

    def _texts(self, key: str) -> list[str | None]:
        whole, start, found = self.arrays[f"{key}.text"].tobytes(), 0, [None]
        for end in self.arrays[f"{key}.ends"].tolist():
            found.append(whole[start:end].decode())  # type: ignore[arg-type]
            start = end
        return found  # type: ignore[return-value]

    def values(self, name: str, kind: type, rows: np.ndarray) -> list[Any]:
        """Return the values of a column at some rows, with None for missing ones."""
        column = self.column(name, kind)
        if isinstance(column, Coded):
            return [column.values[code] for code in column.codes[rows].tolist()]
        return column[rows].tolist()  # a masked value becomes None
