"""Splits and few-shot episodes published by others."""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np

from unimetric.arguments import Count
from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.splits._file import base_name, choose, classes, divide, read, unique


def published(
    table: Table, *, path: str, split: Count = 1, validation: bool = False, on_missing: Literal["error", "skip"] = "error"
) -> Split:
    """Split of ooDML as published by its authors, in JSON or as their pickle.

        {"1": {"fid": 8.59, "train": [class, ...], "test": [...],
               "split_train": [...], "split_val": [...],
               "test_episodes": {"5": {"0": {class: [image, ...], ...}, ...}, ...}}, "2": ...}

    Every listed class and image must be in the dataset. A pickle may contain only lists, dicts,
    strings and numbers. A class of SOP is named by the number in the file names of its images.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021). The files are in the folder `datasplits/` of
        CompVis/Characterizing_Generalization_in_DML.

    Args:
        table: Table of the dataset.
        path: Path of the file.
        split: Number of the split. 1 is the standard split of Cars196 and SOP, 3 that of CUB.
        validation: Whether to train on `split_train` and select the best epoch on `split_val`, as
            before few-shot adaptation.
        on_missing: What to do if an episode lists a missing image: `error`, or `skip` it with a
            warning.
    """
    location, entry, train, test = _entry(table, path, split)
    _episodes(table, entry, test, location, on_missing)
    whole = divide(table, train, test, location)
    if not validation:
        return whole
    parts = [classes(table, choose(entry, key, location), f"{location}, {key}") for key in ("split_train", "split_val")]
    for numbers, key in zip(parts, ("split_train", "split_val"), strict=True):
        strange = np.setdiff1d(numbers, train)
        if len(strange):
            raise UnimetricError(
                f"{location}, {key}: the class `{table.class_names[strange[0]]}` must be one of its training classes",
                f"remove it from {key}, or add it to train",
            )
    both = np.intersect1d(parts[0], parts[1])
    if len(both):
        raise UnimetricError(
            f"{location}: the class `{table.class_names[both[0]]}` is in both split_train and split_val", "remove it from one list"
        )
    labels = table.labels[whole.train]
    return Split(whole.train[np.isin(labels, parts[0])], whole.train[np.isin(labels, parts[1])], whole.test, whole.name)


def episodes(table: Table, *, path: str, split: int, shots: int, on_missing: str = "error") -> list[np.ndarray]:
    """Return the rows of the support images of each published episode.

    The list is empty if the file has no episodes with this number of shots, or is one of `unimetric split`.

    Args:
        table: Table of the dataset.
        path: Path of the file.
        split: Number of the split.
        shots: Number of support images per class. The authors publish 2, 5 and 10.
        on_missing: What to do with missing images, as in `published`.
    """
    if "history" in read(path):
        return []
    location, entry, _, test = _entry(table, path, split)
    found = _episodes(table, entry, test, location, on_missing)
    return found.get(str(shots), [])


def _entry(table: Table, path: str, split: int) -> tuple[str, dict[str, Any], np.ndarray, np.ndarray]:
    entry = choose(read(path), str(split), path)
    location = f"{path}: split {split}"
    train, test = (classes(table, choose(entry, side, location), f"{location}, {side}") for side in ("train", "test"))
    return location, entry, train, test


def _episodes(table: Table, entry: dict[str, Any], test: np.ndarray, location: str, on_missing: str) -> dict[str, list[np.ndarray]]:
    """Return the rows of every episode by shots, after checking that all images exist."""
    wanted = entry.get("test_episodes", {})
    if not wanted:
        return {}
    if not _is_nested(wanted):
        raise UnimetricError(
            f"{location}: its test_episodes must be nested tables", "`unimetric list splits published` shows the form of the file"
        )
    rows = _rows_by_name(table, test)
    found: dict[str, list[np.ndarray]] = {}
    absent: list[str] = []
    named = 0
    for shots, group in wanted.items():
        found[shots] = []
        for number, episode in group.items():
            here = f"{location}, {shots} shots, episode {number}"
            if not np.array_equal(np.sort(classes(table, list(episode), here)), np.sort(test)):
                raise UnimetricError(f"{here}: its classes must be the test classes", "fix the list of classes in the file")
            support = []
            for name, class_ in zip(episode, classes(table, list(episode), here), strict=True):
                images = episode[name]
                if not isinstance(images, list) or len(set(map(str, images))) != len(images) or str(len(images)) != shots:
                    raise UnimetricError(
                        f"{here}: the class `{name}` must have {shots} different images", "fix the list of images in the file"
                    )
                named += len(images)
                for image in images:
                    row = rows.get((int(class_), str(image)))
                    if row is None:
                        absent.append(f"`{image}` of `{name}`")
                    else:
                        support.append(row)
            found[shots].append(np.array(support, np.int64))
    if absent and len(absent) > named / 2:
        raise UnimetricError(
            f"{location}: the images of its episodes must have the names in the dataset, which has no {absent[0]}",
            "they have the names of the devkit: read Cars196 from cars_train/ and cars_test/, not car_ims/; or draw episodes at random",
        )
    if absent:
        distinct = list(dict.fromkeys(absent))
        message = f"{location}: its episodes list {len(distinct)} missing images, the first is {distinct[0]}"
        if on_missing == "error":
            raise UnimetricError(message, "complete the dataset, or skip them with `on_missing='skip'`")
        logging.getLogger("unimetric").warning("%s; they are skipped", message)
    return found


def _is_nested(wanted: Any) -> bool:
    """Return whether this is a dictionary of dictionaries of dictionaries."""
    if not isinstance(wanted, dict):
        return False
    for group in wanted.values():
        if not isinstance(group, dict) or not all(isinstance(episode, dict) for episode in group.values()):
            return False
    return True


def _rows_by_name(table: Table, test: np.ndarray) -> dict[tuple[int, str], int]:
    """Return the row of each (class, image name).

    The authors merged cars_train/ and cars_test/ into one folder per class, where the second of two equal
    names became `_2`. Which one came first is not documented. Here it is the first in the dataset, that of
    cars_train/.
    """
    found: dict[tuple[int, str], int] = {}
    for class_ in test:
        rows = np.flatnonzero(table.labels == class_)
        for row, name in zip(rows, unique([base_name(table.paths[row]) for row in rows]), strict=True):
            found[int(class_), name] = int(row)
    return found
