"""Splits and few-shot episodes that others have published."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from unimetric.errors import UnimetricError, closest
from unimetric.images.pack import located, opened
from unimetric.images.table import Split, Table
from unimetric.splits._file import choose, classes, divide, read, unique


def published(table: Table, *, path: str, split: int = 1, validation: bool = False, on_missing: str = "error") -> Split:
    """A split of ooDML as its authors publish it (Milbich et al., NeurIPS 2021): JSON, or their pickle.

        {"1": {"fid": 8.59, "train": [class, ...], "test": [...], "split_train": [...], "split_val": [...],
               "test_episodes": {"5": {"0": {class: [picture, ...], ...}, ...}, ...}}, "2": ...}

    Everything that is named must be in the dataset. A pickle builds lists, dicts, texts and numbers, and is refused otherwise.

    Args:
        table: the dataset.
        path: the file.
        split: its number; 1 is the usual division of Cars196 and SOP, 3 that of CUB.
        validation: train on `split_train` and choose the best epoch on `split_val`, as before few-shot adaptation.
        on_missing: what to do where an episode names a picture that is absent: `error`, or `skip` it and say so.
    """
    place, entry, train, test = _entry(table, path, split)
    _episodes(table, entry, test, place, on_missing)
    whole = divide(table, train, test, place)
    if not validation:
        return whole
    parts = [classes(table, choose(entry, key, place), f"{place}, {key}") for key in ("split_train", "split_val")]
    for numbers, key in zip(parts, ("split_train", "split_val"), strict=True):
        strange = np.setdiff1d(numbers, train)
        if len(strange):
            raise UnimetricError(
                f"{place}, {key}: the class `{table.class_names[strange[0]]}` is not one of its training classes", "mend it"
            )
    both = np.intersect1d(parts[0], parts[1])
    if len(both):
        raise UnimetricError(f"{place}: the class `{table.class_names[both[0]]}` is in split_train and in split_val", "mend the file")
    labels = table.labels[whole.train]
    return Split(whole.train[np.isin(labels, parts[0])], whole.train[np.isin(labels, parts[1])], whole.test, whole.name)


def episodes(table: Table, *, path: str, split: int, shots: int, on_missing: str = "error") -> list[np.ndarray]:
    """Rows of the support pictures of each published episode; none where the file has none of so many shots.

    Args:
        table: the dataset.
        path: the file.
        split: its number.
        shots: support pictures of a class; the authors publish 2, 5 and 10.
        on_missing: as in `published`.
    """
    place, entry, _, test = _entry(table, path, split)
    found = _episodes(table, entry, test, place, on_missing)
    return found.get(str(shots), [])


def _entry(table: Table, path: str, split: int) -> tuple[str, dict[str, Any], np.ndarray, np.ndarray]:
    entry = choose(read(path), str(split), path)
    place = f"{path}: split {split}"
    train, test = (classes(table, choose(entry, side, place), f"{place}, {side}") for side in ("train", "test"))
    return place, entry, train, test


def _episodes(table: Table, entry: dict[str, Any], test: np.ndarray, place: str, on_missing: str) -> dict[str, list[np.ndarray]]:
    """Rows of every episode by shots; what the file names and the dataset has not is refused."""
    if on_missing not in ("error", "skip"):
        raise UnimetricError(f"published: `on_missing` is {on_missing!r}", closest(str(on_missing), ("error", "skip")))
    wanted = entry.get("test_episodes", {})
    if not wanted:
        return {}
    if not isinstance(wanted, dict) or not all(
        isinstance(group, dict) and all(isinstance(episode, dict) for episode in group.values()) for group in wanted.values()
    ):
        raise UnimetricError(f"{place}: its test_episodes are not tables in tables", "see docs/concepts/shift.md for the form of the file")
    rows = _pictures(table, test)
    found: dict[str, list[np.ndarray]] = {}
    absent: list[str] = []
    named = 0
    for shots, group in wanted.items():
        found[shots] = []
        for number, episode in group.items():
            here = f"{place}, {shots} shots, episode {number}"
            if not np.array_equal(np.sort(classes(table, list(episode), here)), np.sort(test)):
                raise UnimetricError(f"{here}: its classes are not the test classes", "mend the file")
            support = []
            for name, class_ in zip(episode, classes(table, list(episode), here), strict=True):
                pictures = episode[name]
                if not isinstance(pictures, list) or len(set(map(str, pictures))) != len(pictures) or str(len(pictures)) != shots:
                    raise UnimetricError(f"{here}: the class `{name}` has not {shots} different pictures", "mend the file")
                named += len(pictures)
                for picture in pictures:
                    row = rows.get((int(class_), str(picture)))
                    if row is None:
                        absent.append(f"`{picture}` of `{name}`")
                    else:
                        support.append(row)
            found[shots].append(np.array(support, np.int64))
    if absent and len(absent) > named / 2:
        raise UnimetricError(
            f"{place}: the pictures of its episodes are not called as those of the dataset, the first is {absent[0]}",
            "they have the names of the devkit: read Cars196 from cars_train/ and cars_test/, not car_ims/; or draw episodes at random",
        )
    distinct = list(dict.fromkeys(absent))
    message = f"{place}: its episodes name {len(distinct)} absent pictures, the first is {distinct[0] if distinct else ''}"
    if absent and on_missing == "error":
        raise UnimetricError(message, "complete the dataset, or leave them out with `on_missing='skip'`")
    if absent:
        logging.getLogger("unimetric").warning("%s; they are left out", message)
    return found


def _pictures(table: Table, test: np.ndarray) -> dict[tuple[int, str], int]:
    """Row of each (class, picture).

    The authors laid cars_train/ and cars_test/ into one folder a class, where the second of two equal names got `_2`. Which one they took
    first is not written down; here it is the one that comes first in the dataset, that of cars_train/.
    """
    found: dict[tuple[int, str], int] = {}
    for class_ in test:
        rows = np.flatnonzero(table.labels == class_)
        for row, name in zip(rows, unique([_called(table.paths[row]) for row in rows]), strict=True):
            found[int(class_), name] = int(row)
    return found


def _called(path: str) -> str:
    place = located(path)
    return os.path.basename(opened(place[0]).names[place[1]] if place else path)
