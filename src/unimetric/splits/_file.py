"""Read files that list classes, and convert class names to rows of a table."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.errors import UnimetricError, closest
from unimetric.images.pack import located, opened
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def read(path: str) -> dict[str, Any]:
    """Read a dictionary with string keys from a JSON file or a pickle.

    Args:
        path: Path of the file. A file that does not begin as JSON is read as a pickle of only lists,
            dicts, strings and numbers.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be read ({error.strerror})", "name a file of splits; `unimetric split` creates one") from None
    try:
        found = _to_plain(_parse(data), iter(range(100_000 + len(data))))
    except UnimetricError as error:
        raise UnimetricError(f"{path}: {error.message}", error.hint) from None
    except Exception as error:  # a broken pickle raises any type
        raise UnimetricError(f"{path}: neither JSON nor a plain pickle: {error}", "download the file again") from None
    if not isinstance(found, dict):
        raise UnimetricError(
            f"{path}: must hold a dictionary of splits, got a {type(found).__name__}",
            "`unimetric list splits published` shows the form of the file",
        )
    return found


def _parse(data: bytes) -> Any:
    if data.lstrip()[:1] in (b"{", b"["):
        return json.loads(data)
    _check_references(data)
    return _Unpickler(io.BytesIO(data), encoding="latin1").load()


def _check_references(data: bytes) -> None:
    """Raise an error if a pickle uses a tuple twice.

    Nested tuples of that kind take years to hash.
    """
    tuples: set[int] = set()
    before, stored = "", 0
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name in ("DUP", "POP", "POP_MARK") or (name in ("GET", "BINGET", "LONG_BINGET") and int(argument or 0) in tuples):
            raise UnimetricError("a pickle must not use one tuple twice", "do not trust this file")
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = stored if name == "MEMOIZE" else int(argument or 0)
            stored += 1
            (tuples.add if before.startswith("TUPLE") else tuples.discard)(index)
        elif name != "BUILD":  # which leaves the object below its state
            before = name


class _Unpickler(pickle.Unpickler):
    """Unpickler of lists, dicts, strings and numbers.

    A pickle is a program, and any other call is an error.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "scalar":
            return _scalar
        if (module, name) == ("numpy", "dtype"):
            return _Dtype
        if (module, name) == ("_codecs", "encode"):  # older protocols store the bytes of such a number so
            return _encode_bytes
        raise UnimetricError(f"a pickle may hold only lists, dicts, strings and numbers, got `{module}.{name}`", "do not trust this file")


class _Dtype:
    """Placeholder for the dtype of numpy; a pickled number needs only its letters."""

    def __init__(self, letters: str, *_: object) -> None:
        self.letters = letters

    def __setstate__(self, state: object) -> None:
        pass  # byte order and so on; numbers of eight bytes are little-endian on all sources of these files


def _encode_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise UnimetricError(f"the encoding of a pickle must be `latin1`, got `{encoding}`", "do not trust this file")
    return text.encode("latin1")


def _scalar(dtype: _Dtype, data: bytes | str) -> float | int | str:
    """Decode a pickled numpy scalar without numpy.

    It is a number, or a string as in the authors' files.
    """
    raw = data.encode("latin1") if isinstance(data, str) else data
    if re.fullmatch(r"U[0-9]{1,4}", dtype.letters):
        return raw.decode("utf-32-le").rstrip("\0")
    form = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}.get(dtype.letters)
    if form is None:
        raise UnimetricError(f"the type of a scalar must be f8, f4, i8, i4 or U, got `{dtype.letters}`", "do not trust this file")
    return struct.unpack(form, raw)[0]


def _to_plain(value: Any, room: Iterator[int]) -> Any:
    # Every value takes at least one byte of the file, unless lists contain the same list several times.
    if next(room, None) is None:
        raise UnimetricError("lists must not contain the same list many times", "do not trust this file")
    if isinstance(value, dict):
        return {str(key): _to_plain(item, room) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_to_plain(item, room) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UnimetricError(f"may hold only lists, dicts, strings and numbers, got a {type(value).__name__}", "do not trust this file")


def choose(entries: Any, key: str, location: str) -> Any:
    """Return one entry of a dictionary, or raise an error with the closest key."""
    if not isinstance(entries, dict) or key not in entries:
        known = entries if isinstance(entries, dict) else ()
        raise UnimetricError(
            f"{location} has no `{key}`", closest(key, known) or "`unimetric list splits published` shows the form of the file"
        )
    return entries[key]


def classes(table: Table, names: Any, location: str) -> np.ndarray:
    """Return the numbers of the classes listed in a file.

    A name may have `-` instead of the `/` in the name of the dataset, because it was the name of a folder.
    If no name is that of a class, they are the beginnings of the file names of their images:
    `111085122871` for `111085122871_0.JPG`, as ooDML names the classes of SOP.

    Args:
        table: Table of the dataset.
        names: List of class names.
        location: File and entry, for errors.
    """
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UnimetricError(f"{location} must be a list of class names", "`unimetric list splits published` shows the form of the file")
    number = {name.replace("/", "-"): row for row, name in enumerate(table.class_names)}
    begins = _file_beginnings(table) if not any(name.replace("/", "-") in number for name in names) else {}
    number = begins if set(names) <= begins.keys() else number
    for name in names:
        if name.replace("/", "-") not in number:
            raise UnimetricError(f"{location}: unknown class `{name}`", closest(name, table.class_names))
    found = np.array([number[name.replace("/", "-")] for name in names])
    numbers, counts = np.unique(found, return_counts=True)
    if (counts > 1).any():
        repeated = table.class_names[numbers[counts.argmax()]]
        raise UnimetricError(f"{location}: the class `{repeated}` is listed twice", "remove one of the two")
    return found


def _file_beginnings(table: Table) -> dict[str, int]:
    """Return the class of each file name, up to its first underscore."""
    return {base_name(path).partition("_")[0]: int(label) for path, label in zip(table.paths, table.labels, strict=True)}


def original_name(path: str) -> str:
    """Return the path of an image, or the name that its pack stores."""
    packed = located(path)
    return opened(packed[0]).names[packed[1]] if packed else path


def base_name(path: str) -> str:
    """Return the file name of an image, also of one in a pack."""
    return os.path.basename(original_name(path))


def divide(table: Table, train: np.ndarray, test: np.ndarray, location: str, *, validation: float = 0.0, seed: int = 0) -> Split:
    """Split the rows by class, with all the checks of `standard`.

    Classes on neither side are skipped.

    Args:
        table: Table of the dataset.
        train, test: Numbers of the classes.
        location: File and entry, for errors.
        validation: Fraction of the training classes used to select the best epoch.
        seed: Seed of the choice of validation classes.
    """
    both = np.intersect1d(train, test)
    if len(both):
        raise UnimetricError(
            f"{location}: the class `{table.class_names[both[0]]}` is in both training and test", "remove it from one list"
        )
    kept = np.flatnonzero(np.isin(table.labels, np.concatenate([train, test])))
    absent = np.setdiff1d(np.concatenate([train, test]), table.labels)
    if len(absent):
        raise UnimetricError(f"{location}: the class `{table.class_names[absent[0]]}` has no images", "complete the dataset")
    inner = replace(table.take(kept), train=np.isin(table.labels[kept], train))
    split = standard(inner, validation=validation, seed=seed)
    return Split(kept[split.train], kept[split.validation], kept[split.test], Path(location).name)


def unique(names: Sequence[str]) -> list[str]:
    """Make repeated names unique as the authors do.

    The second `00011.jpg` becomes `00011_2.jpg`.

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
