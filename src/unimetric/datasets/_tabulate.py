"""Build the `Table` of a dataset after checks, and split its classes."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from unimetric.arguments import checked
from unimetric.datasets._reading import SUFFIXES, columns
from unimetric.errors import UnimetricError, closest
from unimetric.images.regions import file_of
from unimetric.images.remote import find_statuses, join_path
from unimetric.images.table import Table

Key = TypeVar("Key", int, str)


@checked
def tabulate(
    name: str,
    paths: Sequence[str],
    keys: Sequence[Key],
    class_names: Mapping[Key, str],
    train: Sequence[bool],
    *,
    on_missing: Literal["error", "skip"] = "error",
    query: Sequence[bool] | None = None,
    gallery: Sequence[bool] | None = None,
    group: Sequence[str] | None = None,
    group_rule: str = "class",
) -> Table:
    """Return the `Table` of one dataset, after checking that every listed image exists.

    Args:
        name: Name of the dataset; its `source_names`.
        paths: One file per image.
        keys: Class of each image, a key of `class_names`.
        class_names: Mapping from key to name, in the order of the labels.
        train: Whether each image belongs to the training part.
        on_missing: What to do if listed images are missing: `error`, or `skip` them with a warning.
        query: Query images. Defaults to all.
        gallery: Gallery images. Defaults to all.
        group: Name of the group of each image, or "" for none. Defaults to none.
        group_rule: `class`, `group` or `none`; see `Table`.
    """
    number = {key: row for row, key in enumerate(class_names)}
    try:
        labels = np.fromiter((number[key] for key in keys), np.int64, len(keys))
    except KeyError as error:
        raise UnimetricError(f"{name}: an image has the class {error}, which has no name", "download the annotation files again") from None
    if not paths:
        raise UnimetricError(f"{name}: no images are listed", "images are files that end in " + " ".join(SUFFIXES))
    if len(set(class_names.values())) != len(class_names):
        raise UnimetricError(f"{name}: two classes have the same name", "download the annotation files again")
    check_unicode(name, class_names.values())
    groups = sorted(set(group or ()) - {""})
    group_number = {key: row for row, key in enumerate(groups)}
    table = Table(
        paths=tuple(paths),
        labels=labels,
        class_names=tuple(class_names.values()),
        train=np.asarray(train, bool),
        query=np.asarray(() if query is None else query, bool),  # a table without them has all images
        gallery=np.asarray(() if gallery is None else gallery, bool),
        source_names=(name,),
        group=np.array([group_number.get(key, -1) for key in group or ()], np.int64),
        group_names=tuple(groups),
        group_rule=group_rule,
    )
    there = _present(paths)
    if there.all():
        return table
    absent = np.flatnonzero(~there)
    message = f"{name}: {len(absent):,} of {len(paths):,} listed images are missing, the first is `{paths[absent[0]]}`"
    if on_missing == "error" or not there.any():
        hint = "complete the copy, or skip them with `on_missing='skip'`" if there.any() else "check the folder of the images"
        raise UnimetricError(message, hint)
    logging.getLogger("unimetric").warning("%s; they are skipped", message)
    return table.take(there)


def check_unicode(name: str, class_names: Iterable[str]) -> None:
    """Raise an error if two class names are the same text in different Unicode characters.

    macOS may write `é` as a letter and an accent, and Linux as one character.

    Args:
        name: Name of the dataset, for the error.
        class_names: All classes.
    """
    seen: dict[str, str] = {}
    for each in class_names:
        other = seen.setdefault(unicodedata.normalize("NFC", each), each)
        if other != each:
            raise UnimetricError(
                f"{name}: the classes {other!a} and {each!a} are the same text, `{other}`, in different Unicode characters",
                "write both in the same characters, or rename one of them",
            )


def _present(paths: Sequence[str]) -> np.ndarray:
    """Return which files exist. A link to nothing does not.

    Each folder is listed once, because checking every file separately is slow on network disks.
    """
    known: dict[str, set[str]] = {}
    there = np.zeros(len(paths), bool)
    remote = find_statuses(map(file_of, paths))
    for row, path in enumerate(paths):
        if file_of(path) in remote:
            there[row] = remote[file_of(path)] is not None
            continue
        folder, name = os.path.split(file_of(path))
        if folder not in known:
            try:
                with os.scandir(folder or ".") as entries:
                    known[folder] = {entry.name for entry in entries if not entry.is_symlink() or os.path.exists(entry)}
            except (OSError, ValueError):  # a name with a null byte is a ValueError
                known[folder] = set()
        there[row] = name in known[folder]
    return there


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Return different labels: integers by value, before words, so that 2 comes before 10.

    Labels such as `10.0` are words. Sorting them by value would renumber the classes of existing runs.

    >>> sort_labels(["red", "10", "2", "red"])
    ['2', '10', 'red']
    """
    found = sorted(set(labels), key=lambda label: (0, int(label), label) if label.isdecimal() else (1, 0, label))
    floats = [label for label in found if re.fullmatch(r"\d+\.0", label)]
    if floats != sorted(floats, key=float):
        message = "labels such as `%s` are sorted as words; write `%s` to sort them by value"
        logging.getLogger("unimetric").warning(message, floats[0], floats[0].removesuffix(".0"))
    return found


def divide(name: str, class_names: Sequence[str], keys: Sequence[str], train: float | str, folder: str | Path) -> list[bool]:
    """Return whether each image of a dataset without a published split is for training.

    Args:
        name: Name of the dataset, for the error.
        class_names: All classes, sorted.
        keys: Class of each image.
        train: Fraction of the classes with several images, taken from the front and rounded up; or a text
            file with one training class per line.
        folder: Folder of the text file.
    """
    if isinstance(train, str):
        file = join_path(str(folder), os.path.expanduser(train))
        chosen = {key for (key,) in columns(file, str, hint="write a text file with one training class per line, or use `train=0.5`")}
        for key in sorted(chosen.difference(class_names)):
            raise UnimetricError(f"`{file}`: unknown class `{key}` of {name}", closest(key, class_names))
        return [key in chosen for key in keys]
    images = Counter(keys)
    common = [key for key in class_names if images[key] > 1]  # `without_singles` drops the others
    chosen = set(common[: int(np.ceil(train * len(common) - 1e-9))])  # 0.1 * 30 is a little more than 3
    return [key in chosen for key in keys]


def without_singles(table: Table, on_single: str) -> Table:
    """Check that every class of the queries has at least two images.

    A single image that is only in the gallery is a distractor and is kept.

    Args:
        table: Table of one dataset.
        on_single: What to do with a class of one image: `error`, or `skip` it with a warning.
    """
    name = table.source_names[0]
    lone = (np.bincount(table.labels, minlength=len(table.class_names)) == 1)[table.labels] & table.query  # one row per class
    if not lone.any():
        return table
    first = table.class_names[table.labels[np.flatnonzero(lone)[0]]]
    message = f"{name}: {lone.sum():,} of {len(table.class_names):,} classes have only one image, the first is `{first}`"
    if on_single == "error":
        raise UnimetricError(
            message, "a class needs two images to be learned or retrieved; add some, or skip such classes with `on_single='skip'`"
        )
    logging.getLogger("unimetric").warning("%s; they are skipped", message)
    return table.take(~lone)
