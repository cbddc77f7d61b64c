"""Your own table: a csv file with one line per image."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Literal

from unimetric.arguments import Fraction
from unimetric.datasets._boxes import box_paths
from unimetric.datasets._reading import SUFFIXES, place_file, read_lines
from unimetric.datasets._tabulate import divide, sort_labels, tabulate, without_singles
from unimetric.errors import UnimetricError, closest
from unimetric.images.remote import join_path
from unimetric.images.table import Table

#: Columns that hold the group of an image. The first one that a file has is used.
GROUPS = ("group", "camera", "sequence", "encounter", "date")
PARTS = {"train": True, "validation": False, "val": False, "valid": False, "test": False}
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": False, "nan": False, "none": False}


def csv(
    *,
    file: str,
    train: Fraction | str | None = None,
    on_missing: Literal["error", "skip"] = "error",
    on_single: Literal["error", "skip"] = "error",
    name: str | None = None,
    group: str | None = None,
    group_rule: Literal["class", "group", "none"] = "class",
    boxes: Literal["crop", "clip", "ignore"] = "crop",
) -> Table:
    """Csv or parquet file with the columns of open-metric-learning, or plain `path,label`.

        path,label                              the first half of the sorted labels trains, the rest tests
        label,path,split,is_query,is_gallery    split: train, or validation (or test) for test images

    Labels are sorted as integers by value, and then as words: write `10`, not `10.0`.
    Paths are relative to the csv file, or addresses. `is_query` and `is_gallery` may be missing or, as for
    training images, empty; then all test images are queries and gallery items. Training images
    always are. A column `group`, `camera`, `sequence`, `encounter` or `date` is the group of an image: a
    query does not find the images of its own class and group. Images are cropped to the box of their line
    in pixels, if it has one: `x,y,width,height`, `x_1,x_2,y_1,y_2` as in open-metric-learning, or `bbox` as
    in wildlife-datasets. A file may be listed once per box. Other columns are ignored.

    Reference:
        open-metric-learning (OML-Team); halves as in Oh Song et al. (CVPR 2016).

    Args:
        file: Path of the csv or parquet file, or its address, such as `s3://bucket/images.csv`. Paths in it are
            then relative to that address.
        train: Training labels, instead of the column `split`: a fraction of the sorted labels with
            several images (0.5 is the first half, rounded up), or a text file next to the csv file
            with one label per line.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
        on_single: What to do if a class has only one image: `error`, or `skip` the class. A class
            that is only in the gallery may have one.
        name: Name of the dataset. Defaults to the name of the file.
        group: Column of the groups. Defaults to the first of those above that the file has; "" for no
            groups. An empty value is an image without a group.
        group_rule: Gallery images that a query does not find: `class`, those of its class and group;
            `group`, all of its group; `none`.
        boxes: What to do with boxes: `crop` to them, which must be inside of their images; `clip` those that
            are not; or `ignore` them.
    """
    source = place_file(file)
    rows = read_rows(source)
    groups = find_groups(source, rows, group)
    name = name or PurePosixPath(source.replace(os.sep, "/")).stem
    base = os.path.dirname(source)
    pairs = [_path_and_label(source, number, row) for number, row in rows]
    labels = [label for _, label in pairs]
    _warn_of_nan(source, "label", labels)
    paths = box_paths(source, rows, [join_path(base, path) for path, _ in pairs], boxes)
    parts = []
    names: set[str] = set()
    for number, row in rows:
        part = (row.get("split") or "").strip().lower()
        if "split" in row and train is None and part not in PARTS:
            raise UnimetricError(f"`{source}`, line {number}: unknown split `{part}`", closest(part, PARTS))
        parts.append(PARTS.get(part, False))
        names.add(part)
    class_names = sort_labels(labels)
    if "split" not in rows[0][1] or train is not None:
        parts = divide(name, class_names, labels, 0.5 if train is None else train, base)
    elif {"test"} < names - {"train"}:
        logging.getLogger("unimetric").warning(
            "csv: the test images of `%s` are those of %s", source, " and ".join(sorted(names - {"train"}))
        )
    query, gallery = (_roles(source, rows, parts, column) for column in ("is_query", "is_gallery"))
    table = tabulate(
        name,
        paths,
        labels,
        {key: key for key in class_names},
        parts,
        on_missing=on_missing,
        query=query,
        gallery=gallery,
        group=groups,
        group_rule=group_rule,
    )
    return without_singles(table, on_single)


def read_rows(source: str | Path, needed: tuple[str, ...] = ("path", "label")) -> list[tuple[int, dict[str, str | None]]]:
    """Read the lines of a csv file as dictionaries by column name, each with its line number."""
    rows = list(read_lines(str(source), needed))
    if not rows:
        raise UnimetricError(f"`{source}`: no images are listed", f"add one line per image, with the columns {','.join(needed)}")
    return rows


def find_groups(
    source: str | Path, rows: list[tuple[int, dict[str, str | None]]], column: str | None, usual: tuple[str, ...] = GROUPS
) -> list[str] | None:
    """Return the group of each line, or None if the file has no column of groups.

    The time of a date is not used.
    """
    known = [key for key in (rows[0][1] if rows else {}) if key is not None]
    if column is None:
        column = next((key for key in usual if key in known), "")
    if not column:
        return None
    if column not in known:
        raise UnimetricError(f"`{source}` has no column `{column}`", closest(column, known))
    values = [(row[column] or "").strip() for _, row in rows]
    _warn_of_nan(source, column, values)
    return [_remove_time(value) for value in values] if column == "date" else values


def _warn_of_nan(source: str | Path, column: str, values: list[str]) -> None:
    """Warn about values that other programs write for a missing one. They may be names."""
    number = sum(value.lower() == "nan" for value in values)
    if number:
        message = "`%s`: `%s` is `nan` in %s lines, which share this value; leave it empty if it is missing"
        logging.getLogger("unimetric").warning(message, source, column, f"{number:,}")


def _remove_time(date: str) -> str:
    """Return a date without its time.

    >>> _remove_time("2019-06-30 08:00:00"), _remove_time("6/3/2019 8:15 AM"), _remove_time("20190630T0800"), _remove_time("30 June 2019")
    ('2019-06-30', '6/3/2019', '20190630', '30 June 2019')
    """
    return re.sub(r"(?<=^\d{4}\D\d\d\D\d\d).+|(?<=^\d{8})\D.*|(?<=\d)T\d.*| +\d{1,2}:\d.*", "", date, flags=re.DOTALL)


def _path_and_label(source: str | Path, number: int, row: dict[str, str | None]) -> tuple[str, str]:
    """Return the checked path and label of a line."""
    path, label = (row["path"] or "").strip(), (row["label"] or "").strip()
    if not path or not label:
        missing = "label" if path else "path"
        raise UnimetricError(f"`{source}`, line {number}: the {missing} is missing", "every line needs a path and a label")
    if not path.lower().endswith(SUFFIXES):
        raise UnimetricError(
            f"`{source}`, line {number}: the name of an image must have a known ending, got `{path}`",
            "use a file that ends in " + " ".join(SUFFIXES),
        )
    return path, label


def _roles(source: str | Path, rows: list[tuple[int, dict[str, str | None]]], train: list[bool], column: str) -> list[bool]:
    values = [(row.get(column) or "").strip().lower() for _, row in rows]
    for (number, row), value in zip(rows, values, strict=True):
        if value not in TRUTH:
            raise UnimetricError(f"`{source}`, line {number}: `{column}` must be True or False, got `{row[column]}`", "use True or False")
    # A column that is empty for all test images is a missing column, not a column of False.
    empty = not any(value and not trains for value, trains in zip(values, train, strict=True))
    return [trains or empty or TRUTH[value] for value, trains in zip(values, train, strict=True)]
