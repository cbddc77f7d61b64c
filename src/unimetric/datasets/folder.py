"""Your own folder of images, with one subfolder per class."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from unimetric.arguments import Fraction
from unimetric.datasets._reading import SUFFIXES, locate, pictures
from unimetric.datasets._tabulate import divide, tabulate, without_singles
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "one subfolder per class: CLASS/IMAGE.jpg or GROUP/CLASS/IMAGE.jpg; or train/CLASS/IMAGE.jpg and test/CLASS/IMAGE.jpg"
HELD_OUT = ("test", "val", "valid", "validation")
PARTS = {"train", *HELD_OUT}


def folder(
    *,
    root: str,
    train: Fraction | str | None = None,
    on_single: Literal["error", "skip"] = "error",
    name: str | None = None,
) -> Table:
    """Images in one subfolder per class, as in torchvision's `ImageFolder`.

        root/CLASS/IMAGE.jpg                               the first half of the sorted classes trains,
                                                           the rest tests
        root/GROUP/CLASS/IMAGE.jpg, at any depth           the same; the class is called `GROUP/CLASS`
        root/train/CLASS/IMAGE.jpg, root/test/CLASS/...    the parts are used as named

    A class is the folder that holds images, and its name is the path of that folder within the root
    or the part: `kitchen/cups/red` for `kitchen/cups/red/1.jpg`. Images directly in `kitchen` are
    another class.

    Without a `test` part, `val`, `valid` or `validation` replaces it; with one, they are skipped.
    Files that do not end like images, hidden files, and images outside a class folder are skipped.

    Reference:
        Halves as in Oh Song et al. (CVPR 2016).

    Args:
        root: Folder of the dataset.
        train: Training classes, of all parts together: a fraction of the sorted classes with several
            images (0.5 is the first half, rounded up), or a text file in the folder with one class per
            line. Defaults to the two rules above.
        on_single: What to do if a class has only one image: `error`, or `skip` the class.
        name: Name of the dataset. Defaults to the name of the folder.
    """
    base = locate(root, "folder", LAYOUT)
    name = name or base.resolve().name
    files = [path.split("/") for path in pictures(base)]
    files = [path for path in files if len(path) > 1]
    if not files:
        raise UnimetricError(
            f"`{base}` has no images in subfolders", f"it should hold {LAYOUT}, with files that end in {' '.join(SUFFIXES)}"
        )
    parts = {path[0] for path in files}
    parted = "train" in parts and parts <= PARTS and all(len(path) > 2 for path in files)
    if not parted:
        _check_case(base, files)
        _check_outside(base, files)
        _check_inner_parts(base, files)
    by_part = parted and train is None
    if by_part:
        files = _select_parts(base, files, parts)
    classes = ["/".join(path[1:-1] if parted else path[:-1]) for path in files]
    class_names = sorted(set(classes))
    if by_part:
        trains = [path[0] == "train" for path in files]
    else:
        trains = divide(name, class_names, classes, 0.5 if train is None else train, base)
    paths = [f"{base}/{'/'.join(path)}" for path in files]
    return without_singles(tabulate(name, paths, classes, {key: key for key in class_names}, trains), on_single)


def _select_parts(base: Path, files: list[list[str]], parts: set[str]) -> list[list[str]]:
    """Return the files of the training part, and of the test part or its replacement."""
    held_out = [part for part in HELD_OUT if part in parts]
    if not held_out:
        raise UnimetricError(f"`{base}` has a part `train` and no part `test`", f"add `{base}/test`, or use `train=0.5` to split by class")
    for part in held_out[1:]:
        logging.getLogger("unimetric").warning("folder: `%s/%s` is skipped, because `%s` is the test part", base, part, held_out[0])
    return [path for path in files if path[0] in ("train", held_out[0])]


def _check_case(base: Path, files: list[list[str]]) -> None:
    """Raise an error if the parts are not in lower case.

    `Train/cup` and `Test/cup` are not two classes.
    """
    parts = {path[0] for path in files}
    lower = {part.lower() for part in parts}
    if "train" in lower and len(lower) > 1 and lower <= PARTS and parts != lower and all(len(path) > 2 for path in files):
        raise UnimetricError(
            f"`{base}`: the names of the parts must be in lower case, got {', '.join(sorted(parts))}",
            f"rename them to {', '.join(sorted(lower))}",
        )


def _check_outside(base: Path, files: list[list[str]]) -> None:
    """Raise an error if images are outside the classes of the parts.

    They would make `train/cup` and `test/cup` two classes.
    """
    parts = {path[0] for path in files} & PARTS
    if "train" not in parts or len(parts) == 1 or all(len(path) == 2 for path in files if path[0] in parts):
        return
    outside = [path for path in files if path[0] not in PARTS or len(path) == 2]
    raise UnimetricError(
        f"`{base}`: next to the parts {', '.join(sorted(parts))}, all images must be in class folders of a part, but "
        f"{len(outside):,} are not, the first is `{'/'.join(outside[0])}`",
        f"move them out of `{base}`",
    )


def _check_inner_parts(base: Path, files: list[list[str]]) -> None:
    """Raise an error if the parts are not the outermost folders.

    `cup/train` and `cup/test` are not two classes.
    """
    for depth in range(1, min(map(len, files)) - 1):
        found = {path[depth] for path in files}
        if "train" not in found or len(found) == 1 or not found <= PARTS:
            continue
        outer = {"/".join(path[:depth]) for path in files}
        hint = "move them to the top: train/CLASS/IMAGE.jpg and test/CLASS/IMAGE.jpg"
        if len(outer) == 1:
            hint = f"use `folder(root='{base / outer.pop()}')`"
        raise UnimetricError(
            f"`{base}/{'/'.join(files[0][: depth + 1])}`: the parts `train` and `test` must be the outermost folders", hint
        )
