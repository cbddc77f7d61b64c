"""A table of your own: a csv file with one line a picture."""

from __future__ import annotations

import os
from csv import DictReader, Error
from pathlib import Path

from unimetric.datasets._reading import SUFFIXES, place
from unimetric.datasets._tabulate import divide, tabulate, without_singles
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Table

PARTS = {"train": True, "validation": False, "val": False, "valid": False, "test": False}
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": False, "nan": False, "none": False}


def csv(
    *, file: str, train: float | str | None = None, on_missing: str = "error", on_single: str = "error", name: str | None = None
) -> Table:
    """A csv file: the columns of open-metric-learning (OML-Team), or plain `path,label`; halves as in Oh Song et al. (CVPR 2016).

        path,label                                  the first half of the sorted labels trains, the rest tests
        label,path,split,is_query,is_gallery        split: train, or validation (or test) for what is tested on

    Paths are relative to the csv file. `is_query` and `is_gallery` may be absent or, as for training pictures, empty; then all test
    pictures ask and answer. Training pictures always may. Other columns are passed over, and pictures are not cropped to the boxes
    `x_1, x_2, y_1, y_2`, so that a picture may stand in one line only.

    Args:
        file: the csv file.
        train: which labels train, in place of the column `split`: a share of the sorted labels (0.5 is the first half, rounded up), or
            a text file beside the csv file with one label a line.
        on_missing: `error` where a listed picture is absent, or `skip` it.
        on_single: `error` where a class has one picture only, or `skip` the class; one that only answers may be alone.
        name: what to call the dataset; by default as the file is called.
    """
    source = place(file)
    rows = _rows(source)
    name = name or source.stem
    base = source.parent
    paths, labels, parts = [], [], []
    seen: dict[str, int] = {}
    for number, row in rows:
        if None in row:
            raise UnimetricError(f"`{source}`, line {number}: more values than columns", "put a value that holds a comma in double quotes")
        path, label = (row["path"] or "").strip(), (row["label"] or "").strip()
        if not path or not label:
            raise UnimetricError(f"`{source}`, line {number}: no {'label' if path else 'path'}", "every line needs a path and a label")
        if not path.lower().endswith(SUFFIXES):
            raise UnimetricError(
                f"`{source}`, line {number}: `{path}` is no picture by its name", "a picture ends in " + " ".join(SUFFIXES)
            )
        path = os.path.normpath(base / path)
        if seen.setdefault(path, number) != number:
            raise UnimetricError(
                f"`{source}`, line {number}: `{path}` stands in line {seen[path]} too",
                "name a picture once: it would find itself; where a line is a box in a picture, crop the boxes to files first",
            )
        paths.append(path)
        labels.append(label)
        part = (row.get("split") or "").strip().lower()
        if "split" in row and train is None and part not in PARTS:
            raise UnimetricError(f"`{source}`, line {number}: the split is `{part}`", closest(part, PARTS))
        parts.append(PARTS.get(part, False))
    class_names = sorted(set(labels), key=_order)
    if not rows or "split" not in rows[0][1] or train is not None:
        chosen = divide(name, class_names, 0.5 if train is None else train, base)
        parts = [label in chosen for label in labels]
    query, gallery = (_roles(source, rows, parts, column) for column in ("is_query", "is_gallery"))
    table = tabulate(name, paths, labels, {key: key for key in class_names}, parts, on_missing=on_missing, query=query, gallery=gallery)
    return without_singles(table, on_single)


def _rows(source: Path) -> list[tuple[int, dict[str, str | None]]]:
    """The lines of a csv file by the names of its columns, each with its number."""
    if not source.is_file():
        raise UnimetricError(f"csv: the file `{source}` does not exist", "write `csv(file='...')`, a file with the columns path,label")
    try:
        with source.open(encoding="utf-8-sig", newline="") as stream:
            reader = DictReader(stream)
            for column in ("path", "label"):
                if column not in (reader.fieldnames or ()):
                    raise UnimetricError(f"`{source}` has no column `{column}`", "its first line should be `path,label`, with commas")
            return [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, Error) as error:
        raise UnimetricError(f"cannot read `{source}`: {error}", "save it as a csv file in UTF-8") from None


def _order(label: str) -> tuple[int, int, str]:
    """Numbers by value, before words: 2 comes before 10."""
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)


def _roles(source: Path, rows: list[tuple[int, dict[str, str | None]]], train: list[bool], column: str) -> list[bool]:
    values = [(row.get(column) or "").strip().lower() for _, row in rows]
    for (number, row), value in zip(rows, values, strict=True):
        if value not in TRUTH:
            raise UnimetricError(f"`{source}`, line {number}: `{column}` is `{row[column]}`", "write True or False")
    # A column that is empty wherever it could matter says nothing, which is not the same as nobody.
    silent = not any(value and not trains for value, trains in zip(values, train, strict=True))
    return [trains or silent or TRUTH[value] for value, trains in zip(values, train, strict=True)]
