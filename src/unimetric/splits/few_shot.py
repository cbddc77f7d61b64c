"""Few images of each training class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated

import numpy as np

from unimetric.arguments import Count, Range, Seed
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Split, Table
from unimetric.splits._file import original_name, read
from unimetric.splits.standard import standard

#: Names of the datasets in the authors' files.
_NAMES = {
    "cub200": "CUB",
    "cars196": "Cars",
    "sop": "SOP",
    "inshop": "Inshop",
    "nabirds": "NABird",
    "dogs": "Dogs",
    "flowers102": "Flowers",
    "aircraft": "Aircraft",
}


def few_shot(
    table: Table,
    *,
    shots: Count = 1,
    whole: tuple[str, ...] = (),
    validation: Annotated[float, Range(0, below=1)] = 0.0,
    seed: Seed = 0,
    path: str = "",
) -> Split:
    """Training classes with k images each, and the standard test classes.

    Images are drawn without replacement. A class with fewer than k images repeats some of them, as
    in the authors' code, so that every class has the same weight. With the same seed, fewer shots
    are a subset of more.

    With `whole`, some datasets of a union keep all their training images and so dominate the others.

    With `path`, the images are those of the authors' lists: one pickle `dataset_NAME_shot_K.pkl` per
    dataset, with a list `im_paths`. An image is found by its file name and the folder above it. The
    pickle may contain only lists, dicts, strings and numbers.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023),
        section 5.2 and fig. 6. The lists are in the folder `few_shot/` of
        tjddus9597/Universal-Metric-Learning.

    Args:
        table: Table of the dataset, or the union of several.
        shots: Number of images per training class. The paper uses 1, 2, 4, 8 and 16.
        whole: Names of datasets that keep all their training images.
        validation: Fraction of the training classes held out to select the best epoch, with all
            their images. 0 for none.
        seed: Seed of the images, and of the held-out classes.
        path: Folder of the authors' lists. Empty to draw the images at random.
    """
    if unknown := [name for name in whole if name not in table.source_names]:
        raise UnimetricError(f"`whole` must name datasets of the table, got {unknown[0]}", closest(unknown[0], table.source_names))
    split = standard(table, validation=validation, seed=seed)
    is_whole = np.isin(table.source[split.train], [table.source_names.index(name) for name in whole])
    few = replace(split, train=split.train[~is_whole])
    if path:
        rows = [_listed_rows(table, few, source, shots, path) for source in np.unique(table.source[few.train])]
    else:
        rows = [_drawn_rows(table, few, shots, seed)]
    return replace(split, train=np.sort(np.concatenate([*rows, split.train[is_whole]])), name=f"few_shot({shots})")


def _drawn_rows(table: Table, split: Split, shots: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(split.train)
    order = np.argsort(table.labels[shuffled], kind="stable")  # class by class, each in random order
    rows = shuffled[order]
    _, starts, sizes = np.unique(table.labels[rows], return_index=True, return_counts=True)
    index = np.arange(shots)[None] % sizes[:, None]
    return rows[starts[:, None] + index].ravel()


def _listed_rows(table: Table, split: Split, source: int, shots: int, path: str) -> np.ndarray:
    """Return the rows that the authors list for a dataset, without held-out classes."""
    name = table.source_names[source]
    if name not in _NAMES:
        raise UnimetricError(f"the authors have no list of `{name}`", f"use {', '.join(_NAMES)}, or remove `path` to draw the images")
    file = Path(path).expanduser() / f"dataset_{_NAMES[name]}_shot_{shots}.pkl"
    images = read(str(file)).get("im_paths")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise UnimetricError(f"{file}: `im_paths` must be a list of paths of images", "download the file again")
    rows = {_key(original_name(table.paths[row])): row for row in np.flatnonzero(table.train & (table.source == source))}
    # A pack of images in one folder has their file names alone.
    places = [rows.get(_key(image), rows.get(PurePosixPath(image).name)) for image in images]
    absent = [image for image, row in zip(images, places, strict=True) if row is None]
    if absent:
        raise UnimetricError(
            f"{file}: {len(absent)} of {len(images)} images are not among the training images of `{name}`, the first is {absent[0]}",
            "use the folders of the published dataset (for Cars196, `car_ims`), or remove `path` to draw the images",
        )
    found = np.array(places, np.int64)
    found = found[np.isin(found, split.train)]
    classes, counts = np.unique(table.labels[found], return_counts=True)
    wanted = np.unique(table.labels[split.train[table.source[split.train] == source]])
    if not np.array_equal(classes, wanted) or (counts != shots).any():
        raise UnimetricError(f"{file}: must list {shots} images of each training class of `{name}`", "download the file again")
    return found


def _key(path: str) -> str:
    """Return the file name of an image and the folder above it.

    Together they are unique within each of the datasets.
    """
    return "/".join(PurePosixPath(path.replace("\\", "/")).parts[-2:])
