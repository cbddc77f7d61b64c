"""Training and test classes at a chosen distance from each other."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Annotated

import numpy as np

from unimetric.arguments import Count, Range, Seed
from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.spec import bind, parse
from unimetric.splits._file import choose, classes, divide, read
from unimetric.splits.published import published


def ood(
    table: Table, *, path: str, split: Count = 1, key: str = "", validation: Annotated[float, Range(0, below=1)] = 0.0, seed: Seed = 0
) -> Split:
    """Split of known difficulty from a file created by `unimetric split`.

    The file holds the whole sequence of splits with their Frechet distances, and a few selected
    ones, numbered from the easiest to the hardest. The authors' own files are read as by `published`.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021).

    Args:
        table: Table of the dataset.
        path: Path of the JSON file.
        split: Number of the selected split, from 1.
        key: Key of any split of the sequence instead, such as `12` (swaps) or `R12` (classes of
            each side removed).
        validation: Fraction of the training classes used to select the best epoch instead of for
            training. The authors hold out 0.25. In one of their files, any fraction above 0 selects their
            validation classes.
        seed: Seed of the choice of validation classes.
    """
    file = read(path)
    if "history" not in file:
        if key or not file or not all(isinstance(entry, dict) and "train" in entry for entry in file.values()):
            raise UnimetricError(
                f"{path}: must be a file created by `unimetric split`, but it has no `history`",
                "select a published split by its number, as in `split=3`" if key else "create the file with `unimetric split`",
            )
        return published(table, path=path, split=split, validation=validation > 0)
    names = file.get("classes")
    wanted = key
    if not wanted:
        selected = choose(choose(file, "splits", path), str(split), f"{path}: splits")
        wanted = str(choose(selected, "key", f"{path}: split {split}"))
    history = file["history"]
    if not isinstance(history, list) or not all(isinstance(step, dict) and "key" in step for step in history):
        raise UnimetricError(
            f"{path}: history must be a list of splits, each with its `key`", "create the file again with `unimetric split`"
        )
    steps = {str(step["key"]): step for step in history}
    step = choose(steps, wanted, f"{path}: history")
    location = f"{path}: split {wanted if key else split}"
    number = classes(table, names, f"{path}: classes")
    sides = []
    for side in ("train", "test"):
        rows = choose(step, side, location)
        if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < len(number) for row in rows):
            raise UnimetricError(
                f"{location}, {side}: must be a list of indices of its {len(number)} classes",
                "create the file again with `unimetric split`",
            )
        sides.append(number[np.asarray(rows, np.int64)])
    return divide(table, sides[0], sides[1], location, validation=validation, seed=seed)


def place_of(text: str) -> tuple[str, str] | None:
    """Return the file of a split and its key in `distances`, or None if it has no file.

    Args:
        text: Spec string, such as `ood(path='splits.json', split=3)`.
    """
    if parse(text).name not in ("ood", "published"):
        return None
    arguments = bind("splits", text, seed=0)[1]
    if arguments.get("key"):
        return arguments["path"], f"key {arguments['key']}"
    return arguments["path"], str(arguments.get("split", 1))


def distances(path: str) -> dict[str, float]:
    """Return the Frechet distance of each split of a file, by its number.

    Files created by `unimetric split` also have one per key, under `key ` and the key.

    Args:
        path: Path of a file created by `unimetric split`, or of one in the authors' form.
    """
    file = read(path)
    try:
        if "history" in file:
            chosen = {number: float(entry["distance"]) for number, entry in file["splits"].items()}
            return chosen | {f"key {step['key']}": float(step["distance"]) for step in file["history"]}
        return {number: float(entry["fid"]) for number, entry in file.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UnimetricError(
            f"{path}: each split must have its distance", "`unimetric list splits published` shows the form of the file"
        ) from None


def distance_of(text: str) -> float:
    """Return the Frechet distance of a split in its file, or NaN if there is none.

    Args:
        text: Spec string of the split.
    """
    with suppress(UnimetricError):
        place = place_of(text)
        return distances(place[0]).get(place[1], math.nan) if place else math.nan
    return math.nan
