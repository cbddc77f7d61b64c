"""Training and test classes at a chosen distance from each other."""

from __future__ import annotations

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.spec import bind, parse
from unimetric.splits._file import choose, classes, divide, read


def ood(table: Table, *, path: str, split: int = 1, key: str = "", validation: float = 0.0, seed: int = 0) -> Split:
    """A split of measured difficulty out of a file that `unimetric split` made (Milbich et al., NeurIPS 2021).

    The file holds the whole sequence of splits with their Frechet distances, and the few that were chosen from it, which are numbered from
    the easiest to the hardest.

    Args:
        table: the dataset.
        path: the JSON file.
        split: which of the chosen splits, from 1.
        key: any split of the sequence instead, such as `12` (exchanges) or `R12` (classes of each side removed).
        validation: share of the training classes that choose the best epoch instead of being trained on; the authors hold out 0.25.
        seed: which classes these are.
    """
    file = read(path)
    if "history" not in file:
        raise UnimetricError(
            f"{path}: not a file that `unimetric split` made (it has no `history`)",
            "split files of others are read by `published(path=...)`",
        )
    names = file.get("classes")
    wanted = key or str(choose(choose(choose(file, "splits", path), str(split), f"{path}: splits"), "key", f"{path}: split {split}"))
    history = file["history"]
    if not isinstance(history, list) or not all(isinstance(step, dict) and "key" in step for step in history):
        raise UnimetricError(f"{path}: history is not a list of splits, each with its `key`", "make the file again with `unimetric split`")
    steps = {str(step["key"]): step for step in history}
    step = choose(steps, wanted, f"{path}: history")
    place = f"{path}: split {wanted if key else split}"
    number = classes(table, names, f"{path}: classes")
    sides = []
    for side in ("train", "test"):
        rows = choose(step, side, place)
        if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < len(number) for row in rows):
            raise UnimetricError(
                f"{place}, {side}: not a list of rows of its {len(number)} classes", "make the file again with `unimetric split`"
            )
        sides.append(number[np.asarray(rows, np.int64)])
    return divide(table, sides[0], sides[1], place, validation=validation, seed=seed)


def place_of(text: str) -> tuple[str, str] | None:
    """The file of a split as a run names it, and what `distances` knows it by; nothing for a split that is in no file.

    Args:
        text: such as `ood(path='splits.json', split=3)`.
    """
    if parse(text).name not in ("ood", "published"):
        return None
    arguments = bind("splits", text, seed=0)[1]
    return arguments["path"], f"key {arguments['key']}" if arguments.get("key") else str(arguments.get("split", 1))


def distances(path: str) -> dict[str, float]:
    """The Frechet distance of each split of a file, by its number; of a file of ours also by key, after `key `.

    Args:
        path: a file that `unimetric split` made, or one of the authors' form.
    """
    file = read(path)
    try:
        if "history" in file:
            chosen = {number: float(entry["distance"]) for number, entry in file["splits"].items()}
            return chosen | {f"key {step['key']}": float(step["distance"]) for step in file["history"]}
        return {number: float(entry["fid"]) for number, entry in file.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UnimetricError(
            f"{path}: its splits do not say their distance", "see docs/concepts/shift.md for the form of the file"
        ) from None
