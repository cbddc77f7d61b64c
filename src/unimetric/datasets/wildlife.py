"""Animals, from the metadata table of wildlife-datasets."""

from __future__ import annotations

import logging
from typing import Literal

from unimetric.arguments import Fraction
from unimetric.datasets._boxes import box_paths
from unimetric.datasets._reading import locate
from unimetric.datasets._tabulate import divide, tabulate, without_singles
from unimetric.datasets.csv import find_groups, read_rows
from unimetric.errors import UnimetricError
from unimetric.images.remote import join_path
from unimetric.images.table import Table

LAYOUT = "metadata.csv with the columns image_id,identity,path, and the images"
#: Columns that hold the encounter of an image. The first one that a file has is used.
GROUPS = ("encounter", "video", "camera", "date")


def wildlife(
    *,
    root: str,
    file: str = "metadata.csv",
    train: Fraction | str = 0.5,
    group: str | None = None,
    group_rule: Literal["class", "group", "none"] = "class",
    on_missing: Literal["error", "skip"] = "error",
    on_single: Literal["error", "skip"] = "skip",
    name: str | None = None,
    boxes: Literal["crop", "clip", "ignore"] = "crop",
) -> Table:
    """Metadata table of wildlife-datasets: one line per image of an animal.

        image_id,identity,path      and optionally encounter, video, camera, date (YYYY-MM-DD), bbox

    A class is an identity. Images of the identity `unknown` are left out. A query does not find the
    images of its identity and encounter: they show the same moment. Images are cropped to
    `bbox`, which is `[x, y, width, height]` in pixels; an empty one is the whole image.

    Reference:
        WildlifeDatasets: an open-source toolkit for animal re-identification (Cermak et al., WACV 2024).

    Args:
        root: Folder of the dataset. Paths of the table are relative to it.
        file: Name of the table in the folder.
        train: Training identities: a fraction of the sorted ones with several images (0.5 is the first half,
            rounded up), or a text file in the folder with one identity per line.
        group: Column of the groups. Defaults to the first of those above that the table has; "" for none.
            `group='date'` is required for `split = "by_time"` if there are others.
        group_rule: Gallery images that a query does not find: `class`, those of its identity and group;
            `group`, all of its group; `none`.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
        on_single: What to do if an identity has only one image: `error`, or `skip` it.
        name: Name of the dataset. Defaults to the name of the folder.
        boxes: What to do with boxes: `crop` to them, which must be inside of their images; `clip` those that
            are not; or `ignore` them.
    """
    base = locate(root, "wildlife", LAYOUT)
    source = base / file
    rows = read_rows(source, ("image_id", "identity", "path"))
    for number, row in rows:
        if not (row["identity"] or "").strip() or not (row["path"] or "").strip():
            raise UnimetricError(f"`{source}`, line {number}: identity and path must not be empty", "write `unknown` as the identity")
    known = [(number, row) for number, row in rows if (row["identity"] or "").strip().lower() != "unknown"]
    if len(known) < len(rows):
        message = "%s: %s of %s images are of unknown identity; they are left out"
        logging.getLogger("unimetric").warning(message, source, f"{len(rows) - len(known):,}", f"{len(rows):,}")
    name = name or base.resolve().name
    labels = [str(row["identity"]).strip() for _, row in known]
    class_names = sorted(set(labels))
    table = tabulate(
        name,
        box_paths(source, known, [join_path(str(base), str(row["path"]).strip()) for _, row in known], boxes),
        labels,
        {key: key for key in class_names},
        divide(name, class_names, labels, train, base),
        on_missing=on_missing,
        group=find_groups(source, known, group, GROUPS),
        group_rule=group_rule,
    )
    return without_singles(table, on_single)
