"""What readers of datasets share: a `Table` of what they found, after checks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from unimetric.datasets._reading import SUFFIXES, columns
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Table

Key = TypeVar("Key", int, str)


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
