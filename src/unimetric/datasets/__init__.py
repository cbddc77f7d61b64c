"""One file a dataset: `dataset(root=...) -> Table`. Here is what the readers share: where files lie, and how they are read.

No picture is opened by a reader: a folder is listed once with `os.scandir`, and names decide what is a picture.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from unimetric.errors import UnimetricError, closest
from unimetric.table import Table

Key = TypeVar("Key", int, str)

#: What counts as a picture, by the end of its name in any case.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


def place(root: str) -> Path:
    """Where a root points to: the environment variable `UNIMETRIC_DATA` replaces a leading `data`, and `~` is the home folder.

    >>> place("pictures/shoes").as_posix()
    'pictures/shoes'
    """
    path = Path(root).expanduser()
    elsewhere = os.environ.get("UNIMETRIC_DATA")
    if elsewhere and path.parts[:1] == ("data",):
        return Path(elsewhere).expanduser().joinpath(*path.parts[1:])
    return path


def locate(root: str, name: str, layout: str = "") -> Path:
    """The folder of a dataset, or an error that says what should be there.

    Args:
        root: the folder as it was written; see `place`.
        name: the dataset, for the error.
        layout: what the folder should hold, for the error.
    """
    folder = place(root)
    if folder.is_dir():
        return folder
    state = "is not a folder" if folder.exists() else "does not exist"
    holds = f" (it holds {layout})" if layout else ""
    move = ", or set UNIMETRIC_DATA to the folder that holds it" if Path(root).parts[:1] == ("data",) else ""
    raise UnimetricError(f"{name}: the folder `{folder}` {state}", f"put the dataset there{holds}, write `{name}(root='...')`{move}")


def need(folder: Path, *places: str, layout: str) -> Path:
    """The first of several places in a folder where something is; an error that names the first place where none is."""
    for here in places:
        if (folder / here).exists():
            return folder / here
    raise UnimetricError(f"`{folder / places[0]}` does not exist", f"the folder `{folder}` should hold {layout}")


def columns(path: Path, *kinds: Callable[[str], Any], header: int = 0) -> list[tuple[Any, ...]]:
    """Lines of a text file, cut at white space into columns and turned into `int`, `str`, ...; the last column takes the rest of a line.

    Args:
        path: the file.
        kinds: one function a column.
        header: how many lines to pass over.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnimetricError(f"cannot read `{path}`: {error}", "fetch the file again") from None
    rows = []
    for number, line in enumerate(lines[header:], header + 1):
        if not line.strip():
            continue
        words = line.strip().split(None, len(kinds) - 1)
        try:
            rows.append(tuple(kind(word) for kind, word in zip(kinds, words, strict=True)))
        except ValueError:
            wanted = " ".join(f"<{kind.__name__}>" for kind in kinds)
            raise UnimetricError(f"`{path}`, line {number}: cannot read `{line[:100]}`", f"a line should be: {wanted}") from None
    return rows


def matlab(path: Path, *keys: str) -> list[np.ndarray]:
    """Variables of a .mat file, flat."""
    from scipy.io import loadmat

    try:
        found = loadmat(str(path), variable_names=list(keys))
    except Exception as error:  # scipy raises a dozen kinds for a file that is broken
        raise UnimetricError(
            f"cannot read `{path}`: {error}", "fetch the file again; it should be a MATLAB file of version 7.2 or older"
        ) from None
    for key in keys:
        if key not in found:
            raise UnimetricError(f"`{path}` has no variable `{key}`", "fetch the official file again")
    return [found[key].ravel() for key in keys]


def pictures(folder: Path) -> list[str]:
    """Every picture below a folder, relative to it and sorted; hidden files and folders are passed over."""
    names, waiting = [], [""]
    while waiting:
        inner = waiting.pop()
        try:
            with os.scandir(folder / inner) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                        names.append(inner + entry.name)
                    elif entry.is_dir():
                        waiting.append(f"{inner}{entry.name}/")
        except OSError as error:
            raise UnimetricError(f"cannot list `{folder / inner}`: {error.strerror}", "check its permissions and links") from None
    return sorted(names)


def tabulate(
    name: str,
    paths: Sequence[str],
    keys: Sequence[Key],
    class_names: Mapping[Key, str],
    train: Sequence[bool],
    *,
    on_missing: str = "error",
    query: Sequence[bool] | None = None,
    gallery: Sequence[bool] | None = None,
) -> Table:
    """A `Table` of one dataset, once every listed picture is known to be there.

    Args:
        name: the dataset; its `source_names`.
        paths: one file a picture.
        keys: the class of each picture, a key of `class_names`.
        class_names: key to name, in the order of the labels.
        train: whether a picture belongs to the training part.
        on_missing: what to do when listed pictures are absent: `error`, or `skip` them and say so.
        query: pictures that ask; all by default.
        gallery: pictures that answer; all by default.
    """
    choice(name, "on_missing", on_missing, ("error", "skip"))
    number = {key: row for row, key in enumerate(class_names)}
    try:
        labels = np.fromiter((number[key] for key in keys), np.int64, len(keys))
    except KeyError as error:
        raise UnimetricError(f"{name}: a picture has the class {error}, which has no name", "fetch the annotation files again") from None
    if not paths:
        raise UnimetricError(f"{name}: no pictures are listed", "pictures are files that end in " + " ".join(SUFFIXES))
    if len(set(class_names.values())) != len(class_names):
        raise UnimetricError(f"{name}: two classes have the same name", "fetch the annotation files again")
    everywhere = np.ones(len(paths), bool)
    table = Table(
        paths=tuple(paths),
        labels=labels,
        class_names=tuple(class_names.values()),
        train=np.asarray(train, bool),
        query=everywhere if query is None else np.asarray(query, bool),
        gallery=everywhere if gallery is None else np.asarray(gallery, bool),
        source_names=(name,),
    )
    there = _present(paths)
    if there.all():
        return table
    absent = np.flatnonzero(~there)
    message = f"{name}: {len(absent):,} of {len(paths):,} listed pictures are absent, the first is `{paths[absent[0]]}`"
    if on_missing == "error" or not there.any():
        hint = "complete the copy, or leave them out with `on_missing='skip'`" if there.any() else "check where the pictures lie"
        raise UnimetricError(message, hint)
    logging.getLogger("unimetric").warning("%s; they are left out", message)
    return table.take(there)


def _present(paths: Sequence[str]) -> np.ndarray:
    """Which files exist. Folders are listed once each: asking for every file by itself is slow on network disks."""
    known: dict[str, set[str]] = {}
    there = np.zeros(len(paths), bool)
    for row, path in enumerate(paths):
        folder, name = os.path.split(path)
        if folder not in known:
            try:
                with os.scandir(folder or ".") as entries:
                    known[folder] = {entry.name for entry in entries}
            except (OSError, ValueError):  # a name with a null byte is a ValueError
                known[folder] = set()
        there[row] = name in known[folder]
    return there


def choice(name: str, key: str, value: str, allowed: Sequence[str]) -> None:
    """Stop unless an argument is one of the words that it may be."""
    if value not in allowed:
        raise UnimetricError(f"{name}: `{key}` is {value!r}", closest(str(value), allowed))


def divide(name: str, class_names: Sequence[str], train: float | str, folder: Path) -> set[str]:
    """The training classes of a dataset that has no published division.

    Args:
        name: the dataset, for the error.
        class_names: all classes, sorted.
        train: the share of the classes, taken from the front and rounded up; or a text file with one training class a line.
        folder: where the text file is looked for.
    """
    if isinstance(train, str):
        file = folder / Path(train).expanduser()
        chosen = {key for (key,) in columns(file, str)}
        for key in sorted(chosen.difference(class_names)):
            raise UnimetricError(f"`{file}` names the class `{key}`, which {name} has not", closest(key, class_names))
        return chosen
    if not 0 <= train <= 1:
        raise UnimetricError(f"{name}: `train` is {train}", "write a share of the classes between 0 and 1, such as `train=0.5`")
    return set(class_names[: int(np.ceil(train * len(class_names) - 1e-9))])  # 0.1 * 30 is a little more than 3


def without_singles(table: Table, on_single: str) -> Table:
    """A table in which every class that is asked for has two pictures at least; a lone picture that only answers is a distractor.

    Args:
        table: one dataset.
        on_single: what to do with a class of one picture: `error`, or `skip` it and say so.
    """
    name = table.source_names[0]
    choice(name, "on_single", on_single, ("error", "skip"))
    lone = (np.bincount(table.labels, minlength=len(table.class_names)) == 1)[table.labels] & table.query  # one row a class
    if not lone.any():
        return table
    first = table.class_names[table.labels[np.flatnonzero(lone)[0]]]
    message = f"{name}: {lone.sum():,} of {len(table.class_names):,} classes have one picture only, the first is `{first}`"
    if on_single == "error":
        raise UnimetricError(
            message, "a class needs two pictures to be learnt or found; add some, or leave such classes out with `on_single='skip'`"
        )
    logging.getLogger("unimetric").warning("%s; they are left out", message)
    return table.take(~lone)
