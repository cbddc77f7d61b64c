"""Files that name classes: how they are read, and how names become rows of a table."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def read(path: str) -> dict[str, Any]:
    """The dictionary in a JSON file or in a pickle, all of whose keys are texts.

    Args:
        path: the file. What does not begin as JSON is read as a pickle, which builds lists, dicts, texts and numbers and nothing else.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be read ({error.strerror})", "name a file of splits; `unimetric split` makes one") from None
    try:
        found = _plain(json.loads(data) if data.lstrip()[:1] in (b"{", b"[") else _Unpickler(io.BytesIO(data), encoding="latin1").load())
    except UnimetricError as error:
        raise UnimetricError(f"{path}: {error.message}", error.hint) from None
    except Exception as error:  # a broken pickle raises anything
        raise UnimetricError(f"{path}: neither JSON nor a plain pickle: {error}", "fetch the file again") from None
    if not isinstance(found, dict):
        raise UnimetricError(f"{path}: holds a {type(found).__name__}, not a dictionary of splits", "see docs/concepts/shift.md")
    return found


class _Unpickler(pickle.Unpickler):
    """Builds lists, dicts, texts and numbers: a pickle is a program, and everything else that it could call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "scalar":
            return _number
        if (module, name) == ("numpy", "dtype"):
            return _Dtype
        if (module, name) == ("_codecs", "encode"):  # how older protocols write the bytes of such a number
            return _bytes
        raise UnimetricError(
            f"the pickle asks for `{module}.{name}`; only lists, dicts, texts and numbers are read", "do not trust this file"
        )


class _Dtype:
    """Stands in for numpy's dtype, of which a pickled number needs the letters."""

    def __init__(self, letters: str, *_: object) -> None:
        self.letters = letters

    def __setstate__(self, state: object) -> None:
        pass  # byte order and the like; those of eight bytes are little-endian everywhere that these files come from


def _bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise UnimetricError(f"the pickle asks for the encoding `{encoding}`", "do not trust this file")
    return text.encode("latin1")


def _number(dtype: _Dtype, data: bytes | str) -> float | int:
    """What numpy would make of a pickled scalar, without numpy."""
    form = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}.get(dtype.letters)
    if form is None:
        raise UnimetricError(f"a number of type `{dtype.letters}` is not read", "do not trust this file")
    return struct.unpack(form, data.encode("latin1") if isinstance(data, str) else data)[0]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UnimetricError(f"holds a {type(value).__name__}; only lists, dicts, texts and numbers are read", "do not trust this file")


def choose(entries: Any, key: str, place: str) -> Any:
    """One entry of a dictionary, or an error that says which there are."""
    if not isinstance(entries, dict) or key not in entries:
        known = entries if isinstance(entries, dict) else ()
        raise UnimetricError(f"{place} has no `{key}`", closest(key, known) or "see docs/concepts/shift.md for the form of the file")
    return entries[key]


def classes(table: Table, names: Any, place: str) -> np.ndarray:
    """Numbers of the classes that a file names. A name may have `-` for the `/` of the dataset's: it was a folder once.

    Args:
        table: the dataset.
        names: a list of class names.
        place: the file and the entry, for errors.
    """
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UnimetricError(f"{place} is not a list of class names", "see docs/concepts/shift.md for the form of the file")
    number = {name.replace("/", "-"): row for row, name in enumerate(table.class_names)}
    for name in names:
        if name.replace("/", "-") not in number:
            raise UnimetricError(f"{place} names the class `{name}`, which the dataset has not", closest(name, table.class_names))
    found = np.array([number[name.replace("/", "-")] for name in names])
    numbers, counts = np.unique(found, return_counts=True)
    if (counts > 1).any():
        raise UnimetricError(f"{place} names the class `{table.class_names[numbers[counts.argmax()]]}` twice", "mend the file")
    return found


def divide(table: Table, train: np.ndarray, test: np.ndarray, place: str, *, validation: float = 0.0, seed: int = 0) -> Split:
    """Rows of a division by classes, with all the checks of `standard`; classes on neither side are left out.

    Args:
        table: the dataset.
        train, test: numbers of the classes.
        place: the file and the entry, for errors.
        validation: share of the training classes that choose the best epoch.
        seed: which classes these are.
    """
    both = np.intersect1d(train, test)
    if len(both):
        raise UnimetricError(f"{place}: the class `{table.class_names[both[0]]}` is in training and in test", "mend the file")
    kept = np.flatnonzero(np.isin(table.labels, np.concatenate([train, test])))
    absent = np.setdiff1d(np.concatenate([train, test]), table.labels)
    if len(absent):
        raise UnimetricError(f"{place}: no picture of the class `{table.class_names[absent[0]]}` is there", "complete the dataset")
    inner = replace(table.take(kept), train=np.isin(table.labels[kept], train))
    split = standard(inner, validation=validation, seed=seed)
    return Split(kept[split.train], kept[split.validation], kept[split.test], Path(place).name)


def unique(names: Sequence[str]) -> list[str]:
    """Names that may clash, made different as the authors did: the second `00011.jpg` is `00011_2.jpg`.

    >>> unique(["a.jpg", "b.jpg", "a.jpg"])
    ['a.jpg', 'b.jpg', 'a_2.jpg']
    """
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        stem, dot, suffix = name.rpartition(".")
        result.append(f"{stem}_{seen[name]}{dot}{suffix}" if seen[name] > 1 else name)
    return result
