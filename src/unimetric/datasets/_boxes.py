"""Read the boxes of a csv file, and check them against the sizes of the images."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from unimetric.errors import UnimetricError
from unimetric.images.decode import image_size
from unimetric.images.pack import count_cores, map_in_order
from unimetric.images.regions import Box, join_box

Row = Mapping[str, str | None]
#: Columns of a box. The first set that a file has is used: open-metric-learning writes the second, wildlife-datasets the third.
COLUMNS = (("x", "y", "width", "height"), ("x_1", "x_2", "y_1", "y_2"), ("bbox",))
_HINT = "a box is x,y,width,height or x_1,x_2,y_1,y_2 or bbox `[x, y, width, height]` in pixels, or empty for the whole image"


def read_box(source: str | Path, number: int, row: Row) -> Box | None:
    """Return the box of a line in whole pixels, or None if the line has none.

    Args:
        source: Csv file, for the error.
        number: Number of the line.
        row: Cells by column.
    """
    found = _read(source, number, row)
    if found is not None and min(found[:2]) < 0:
        raise _error(source, number, f"must not begin outside the image, got x={found[0]}, y={found[1]}")
    return found


def box_paths(source: str | Path, rows: Sequence[tuple[int, Row]], paths: Sequence[str], boxes: str) -> list[str]:
    """Return the paths of the lines with their boxes.

    The header of every image that has a box is read, so that a wrong box is found before training.

    Args:
        source: Csv file, for errors.
        rows: Number and cells of each line.
        paths: Path of the image of each line.
        boxes: `crop` to boxes, `clip` those that exceed their image, or `ignore` them.

    Raises:
        UnimetricError: A box is not four numbers, is empty, or exceeds its image. `clip` accepts boxes that are partly inside.
            Or an image or a box is listed twice.
    """
    found = [None if boxes == "ignore" else _read(source, number, row) for number, row in rows]
    files = list(dict.fromkeys(path for path, box in zip(paths, found, strict=True) if box is not None))
    with closing(map_in_order(image_size, files, 4 * count_cores())) as sizes:  # waits for the disk, not for the processor
        size_of = dict(zip(files, sizes, strict=True))
    result: dict[str, int] = {}
    for (number, _), path, box in zip(rows, paths, found, strict=True):
        size = size_of.get(path)
        if box is not None and size is not None:  # an image that is missing or broken is reported when it is listed or decoded
            box = _inside(source, number, path, box, size, clip=boxes == "clip")
        path = join_box(path, box and (max(0, box[0]), max(0, box[1]), *box[2:]))
        if result.setdefault(path, number) != number:
            raise UnimetricError(
                f"`{source}`, line {number}: `{path}` is listed in line {result[path]} already",
                "list an image or a box once, because it would find itself",
            )
    return list(result)


def _inside(source: str | Path, number: int, path: str, box: Box, size: tuple[int, int], *, clip: bool) -> Box:
    """Return a box that is inside its image."""
    left, top, width, height = box
    edges = (max(0, left), max(0, top), min(size[0], left + width), min(size[1], top + height))
    clipped = (edges[0], edges[1], edges[2] - edges[0], edges[3] - edges[1])
    if (clipped != box and not clip) or min(clipped[2:]) < 1:
        raise _error(
            source,
            number,
            f"must be inside `{os.path.basename(path)}` of {size[0]} x {size[1]} pixels, got x={left}, y={top}, width={width}, "
            f"height={height}",
            "" if clip else "correct it, or crop such boxes to the image with `boxes='clip'`",
        )
    return clipped


def _read(source: str | Path, number: int, row: Row) -> Box | None:
    """Return the box of a line, which may begin or end outside of the image."""
    columns = next((each for each in COLUMNS if all(name in row for name in each)), None)
    if columns is None:
        return None
    cells = [(row[name] or "").strip() for name in columns]
    texts = re.split(r"[,;\s]+", cells[0].strip("[]() ")) if len(columns) == 1 else cells
    if all(text.lower() in ("", "nan", "none") for text in texts):
        return None
    try:
        values = [float(text) for text in texts]
    except ValueError:
        values = []
    if len(values) != 4 or not all(math.isfinite(value) and abs(value) < 2**31 for value in values):
        raise _error(source, number, f"must be four numbers, got `{','.join(cells)}`")
    if columns[0] == "x_1":
        left, right, top, bottom = values
    else:
        left, top, right, bottom = values[0], values[1], values[0] + values[2], values[1] + values[3]
    # Rounding the edges, not the size, keeps boxes that share an edge adjacent.
    box = (round(left), round(top), round(right) - round(left), round(bottom) - round(top))
    if min(box[2:]) < 1:
        raise _error(source, number, f"must be at least 1 pixel wide and high, got `{','.join(cells)}`")
    return box


def _error(source: str | Path, number: int, problem: str, hint: str = "") -> UnimetricError:
    return UnimetricError(f"`{source}`, line {number}: the box {problem}", hint or _HINT)
