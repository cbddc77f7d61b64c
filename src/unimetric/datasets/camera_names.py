"""Re-identification datasets whose file names hold identity and camera, such as VeRi-776."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Literal

from unimetric.arguments import Range
from unimetric.datasets._reading import locate, pictures
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "the folders image_train, image_query and image_test (or bounding_box_train, query and bounding_box_test)"
#: Names of the folders of each part.
FOLDERS = {
    "train": ("image_train", "bounding_box_train", "train"),
    "query": ("image_query", "query"),
    "gallery": ("image_test", "bounding_box_test", "gallery", "test"),
}


def camera_names(
    *,
    root: str,
    pattern: str = r"(-?\d+)_c(\d+)",
    junk: Annotated[int, Range()] = -1,
    distractor: Annotated[int, Range()] = 0,
    group_rule: Literal["class", "group", "none"] = "class",
    name: str | None = None,
) -> Table:
    """Images named by identity and camera: VeRi-776, Market-1501 and similar datasets.

        image_train/0001_c001_00016450_0.jpg, image_query/..., image_test/...
        bounding_box_train/0002_c1s1_000451_03.jpg, query/..., bounding_box_test/...

    A class is an identity, and a group is a camera: a query does not find the images of its identity and
    camera. Junk images of the gallery are left out; distractors are gallery images that match nothing.
    Training images are both queries and gallery items, so that some of them can be used for validation.

    Reference:
        Scalable person re-identification: a benchmark (Zheng et al., ICCV 2015); A deep learning-based
        approach to progressive vehicle re-identification (Liu et al., ECCV 2016).

    Args:
        root: Folder of the dataset.
        pattern: Regular expression of the start of a file name, with two groups: identity and camera.
        junk: Identity of junk images.
        distractor: Identity of distractors.
        group_rule: Gallery images that a query does not find: `class`, those of its identity and camera;
            `group`, all of its camera; `none`.
        name: Name of the dataset. Defaults to the name of the folder.
    """
    base = locate(root, "camera_names", LAYOUT)
    name = name or base.resolve().name
    form = _compile(pattern)
    rows: list[tuple[str, int, str, str]] = []
    for part, folders in FOLDERS.items():
        folder = next((base / each for each in folders if (base / each).is_dir()), None)
        if folder is None:
            raise UnimetricError(f"`{base}` has no folder of {part} images", f"it should hold {LAYOUT}")
        for file in pictures(folder):
            match = form.match(file.rpartition("/")[2])
            if match is None or not match[1].lstrip("-").isdecimal():
                raise UnimetricError(
                    f"`{folder / file}`: the name must start with identity and camera, such as `0002_c1`", f"got `pattern={pattern!r}`"
                )
            rows.append((f"{folder}/{file}", int(match[1]), match[2], part))
    lost = [row for row in rows if row[1] == junk]
    if lost:
        logging.getLogger("unimetric").info("%s: %s junk images are left out", name, f"{len(lost):,}")
    rows = [row for row in rows if row[1] != junk]
    identities = sorted({identity for _, identity, _, _ in rows})
    return tabulate(
        name,
        [path for path, *_ in rows],
        [identity for _, identity, _, _ in rows],
        {identity: str(identity) for identity in identities},
        [part == "train" for *_, part in rows],
        query=[part != "gallery" and (part == "train" or identity != distractor) for _, identity, _, part in rows],
        gallery=[part != "query" for *_, part in rows],
        group=[f"camera {camera}" for _, _, camera, _ in rows],
        group_rule=group_rule,
    )


def _compile(pattern: str) -> re.Pattern[str]:
    """Return the regular expression, which must have two groups."""
    try:
        form = re.compile(pattern)
    except re.error as error:
        raise UnimetricError(f"`pattern` must be a regular expression, got {pattern!r}: {error}", r"use `(-?\d+)_c(\d+)`") from None
    if form.groups != 2:
        raise UnimetricError(f"`pattern` must have two groups, identity and camera, got {form.groups}", r"use `(-?\d+)_c(\d+)`")
    return form
