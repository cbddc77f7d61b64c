"""Any folder of images, with or without classes, and csv files with any columns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from unimetric.datasets._boxes import read_box
from unimetric.datasets._reading import SUFFIXES, classify, identify, is_parquet, locate, open_parquet, place_file, read_lines
from unimetric.datasets._tabulate import check_unicode
from unimetric.errors import UnimetricError
from unimetric.images.pack import located
from unimetric.images.regions import file_of, join_box
from unimetric.images.remote import file_status, find_statuses, is_remote, join_path, make_absolute, open_file
from unimetric.images.table import Table

#: Column of a csv file that holds the paths of the images.
PATH = "path"
#: Column that holds the class of an image.
LABEL = "label"

Value = str | int | float | bool | None


def files(*, root: str, labels: bool = False, name: str | None = None) -> Table:
    """All images below a folder, at any depth. Classes are optional.

    Without classes, all images are of one class without a name, which can be embedded but not trained on.
    Hidden files, files that do not end like images and folders that cannot be listed are skipped.

    Reference:
        Folders as in torchvision's `ImageFolder` (Marcel and Rodriguez, ACM Multimedia 2010), but recursive.

    Args:
        root: Folder of the images.
        labels: Whether the class of an image is the name of the folder that holds it.
        name: Name of the dataset. Defaults to the name of the folder.
    """
    base = locate(root, "files", "images at any depth")
    name = name or base.resolve().name
    found = list(walk(base, labels=labels))
    if not found:
        raise UnimetricError(f"`{base}` has no images", f"images are files that end in {' '.join(SUFFIXES)}")
    classes = [str(each.columns.get(LABEL) or "") for each in found]
    class_names = sorted(set(classes))
    check_unicode(name, class_names)
    number = {key: row for row, key in enumerate(class_names)}
    return Table(
        paths=tuple(each.path for each in found),
        labels=np.array([number[key] for key in classes], np.int64),
        class_names=tuple(class_names),
        train=np.zeros(len(found), bool),
        source_names=(name,),
    )


@dataclass(frozen=True)
class ImageFile:
    """An image of a source, before it is read.

    Args:
        id: Path relative to the source, with forward slashes.
        path: Path of the file, or `FILE.pack::ROW`.
        size: Size of the file in bytes; -1 if it does not exist.
        mtime: Time of its last change in nanoseconds.
        columns: Further values by column.
    """

    id: str
    path: str
    size: int
    mtime: int
    columns: dict[str, Value] = field(default_factory=dict)


def walk(root: Path, *, labels: bool = False, problems: list[str] | None = None, skip: Path | None = None) -> Iterator[ImageFile]:
    """Yield the images below a folder in a fixed order and in bounded memory.

    Args:
        root: Folder.
        labels: Whether the column `label` is the name of the folder that holds an image.
        problems: List that receives a sentence about each folder that cannot be listed.
        skip: Existing folder whose images are skipped.
    """
    waiting = [""]
    entered = set() if skip is None else {identify(os.stat(skip))}
    while waiting:
        inner = waiting.pop()
        folder = os.path.join(root, inner) if inner else str(root)
        images: list[str] = []  # names only: a folder may hold millions
        deeper: list[str] = []
        try:
            status = os.stat(folder)
            with os.scandir(folder) as entries:
                for entry in entries:
                    kind = classify(entry)
                    if kind in ("image", "broken"):  # a link to nothing is reported as unreadable
                        images.append(entry.name)
                    elif kind == "folder":
                        deeper.append(f"{inner}{entry.name}/")
        except OSError as error:
            if problems is not None:
                problems.append(f"{folder}: cannot be listed ({error.strerror})")
            continue
        if identify(status) in entered:  # a link to a folder that holds it
            continue
        entered.add(identify(status))
        columns: dict[str, Value] = {LABEL: inner.rstrip("/").rpartition("/")[2] or None} if labels else {}
        yield from describe_files((inner + name, os.path.join(folder, name), columns) for name in sorted(images))
        waiting += sorted(deeper, reverse=True)


def describe_files(images: Iterable[tuple[str, str, dict[str, Value]]]) -> Iterator[ImageFile]:
    """Yield images with the size and time of their files or packs, in bounded memory.

    A missing file has the size -1, and is reported when it is read.

    Args:
        images: Id, path and columns of each image.
    """
    images = iter(images)
    known: dict[str, tuple[int, int] | None] = {}
    while some := list(islice(images, 1024)):
        files = [_container(path) for _, path, _ in some]
        held = {file: known[file] for file in set(files) & known.keys()}
        known = held | find_statuses(set(files) - held.keys())
        for (id_, path, columns), file in zip(some, files, strict=True):
            status = known[file] if file in known else _local_status(file)
            yield ImageFile(id_, path, *(status or (-1, -1)), columns)


def _container(path: str) -> str:
    """Return the file that holds an image."""
    location = located(path)
    return location[0] if location else file_of(path)


def _local_status(file: str) -> tuple[int, int] | None:
    try:
        return file_status(file)
    except OSError:
        return None


def column_types(file: str | Path) -> dict[str, type]:
    """Return the type of every column of a csv or parquet file except `path`.

    Values are integers, numbers, truth values (`true`, `false`) or text. An empty value is missing, and so is `NaN`
    in a column of numbers or truth values. The label is always text. A parquet file declares its types; those of a
    csv file follow from its values.

    Args:
        file: Csv file in UTF-8 whose first line names the columns, or parquet file.
    """
    source = place_file(file)
    if is_parquet(source):
        next(read_lines(source, (PATH,)), None)  # checks the columns
        with open_file(source) as stream:
            schema = open_parquet(stream, source).schema_arrow
        return {each.name: str if each.name == LABEL else _arrow_type(str(each.type)) for each in schema if each.name != PATH}
    types: dict[str, set[type]] = {}
    for _, row in read_lines(source, (PATH,)):
        for key, text in row.items():
            if key != PATH:
                value = _value(text)
                types.setdefault(key, set()).update(() if value is None or _is_nan(value) else {type(value)})
    return {key: str if key == LABEL else _common(found) for key, found in types.items()}


def _arrow_type(name: str) -> type:
    """Return the type of a column by its name in a parquet file.

    Dates, lists and others are text.

    >>> _arrow_type("uint8"), _arrow_type("double"), _arrow_type("bool"), _arrow_type("timestamp[us]")
    (<class 'int'>, <class 'float'>, <class 'bool'>, <class 'str'>)
    """
    if name.startswith(("int", "uint")):
        return int
    return {"float": float, "double": float, "halffloat": float, "bool": bool}.get(name, str)


def _common(found: set[type]) -> type:
    """Return the type that holds the values of some types."""
    if len(found) == 1:
        return next(iter(found))
    return float if found == {int, float} else str


def read_csv(file: str | Path, types: dict[str, type]) -> Iterator[ImageFile]:
    """Yield the images of a csv or parquet file in bounded memory, with typed columns.

    Args:
        file: File with a column `path`, and boxes as in the dataset `csv`. Paths are relative to the file, or addresses,
            such as `s3://bucket/a.jpg` or `file:///data/a.jpg`.
        types: Type of each further column, as in `column_types`. Other columns are ignored.

    Raises:
        UnimetricError: A line has no path or a wrong box, or a value does not have the type of its column.
    """
    return describe_files(_list_rows(place_file(file), types))


def _list_rows(source: str, types: dict[str, type]) -> Iterator[tuple[str, str, dict[str, Value]]]:
    """Yield id, path and columns of the lines of a list."""
    base = os.path.dirname(make_absolute(source))
    for number, row in read_lines(source, (PATH,)):
        path = (row[PATH] or "").strip()
        if not path:
            raise UnimetricError(f"`{source}`, line {number}: the path is missing", "every line needs a path")
        if "\0" in path:
            raise UnimetricError(f"`{source}`, line {number}: the path must not contain NUL, got {path!r}", "write the file again")
        whole = join_box(join_path(base, path), read_box(source, number, row))
        columns = {key: _cast(source, number, key, text, types[key]) for key, text in row.items() if key in types}
        yield _make_id(whole, base), whole, columns


def _make_id(path: str, base: str) -> str:
    """Return a path relative to a folder, or unchanged if it is elsewhere."""
    if is_remote(path) or is_remote(base):
        return path.removeprefix(f"{base}/")
    inside = os.path.relpath(path, base)
    return (path if inside.startswith("..") else inside).replace(os.sep, "/")


def _value(text: str | None) -> Value:
    """Return the value of a cell, by its spelling.

    An integer of more than 64 bits is text, because a float has other digits, and so is a number beyond those of a float.

    >>> _value(" 7"), _value("0.5"), _value("true"), _value("007"), _value(""), _value("+5"), _value("-.5"), _value("1e999")
    (7, 0.5, True, '007', None, 5, -0.5, '1e999')
    """
    text = (text or "").strip()
    if not text:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    digits = text[1:] if text[0] in "+-" else text
    if digits.isascii() and digits.isdecimal() and (digits == "0" or digits[0] != "0"):
        return int(text) if len(digits) < 20 and -(2**63) <= int(text) < 2**63 else text
    if digits.isascii() and (digits[:1] in set("123456789.") or digits[:2] == "0."):
        try:
            number = float(text)
        except ValueError:
            return text
        return number if np.isfinite(number) and "_" not in text else text
    return text


def _is_nan(value: Value) -> bool:
    """Return whether a value is how other programs write a missing number."""
    return isinstance(value, str) and value.lower() == "nan"


def _cast(source: str, number: int, column: str, text: str | None, kind: type) -> Any:
    """Return the value of a cell as the type of its column."""
    value = _value(text)
    if value is None:
        return None
    if kind is str:
        return (text or "").strip()
    if _is_nan(value):
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        words = {int: "integers", float: "numbers", bool: "true or false"}
        raise UnimetricError(
            f"`{source}`, line {number}: `{column}` must hold {words[kind]}, got `{text}`", "correct the value, or build a new index"
        )
    return value
