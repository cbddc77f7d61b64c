"""Boxes in images, as part of a path: `zebra.jpg#xywh=40,10,200,150`.

The notation is that of media fragments (W3C). A path with a box is the path of an image like any other, so several boxes of one file are
several images.
"""

from __future__ import annotations

import re

from unimetric.images.members import split_member

#: Left, top, width and height in whole pixels of the stored image, before its EXIF orientation turns it. Pillow turns TIFF files
#: while it reads them.
Box = tuple[int, int, int, int]

_BOX = re.compile(r"(.+)#xywh=(\d+),(\d+),(\d+),(\d+)", re.DOTALL)


def split_box(path: str) -> tuple[str, Box | None]:
    """Return the file and the box of a path.

    >>> split_box("zebra.jpg#xywh=40,10,200,150"), split_box("zebra.jpg")
    (('zebra.jpg', (40, 10, 200, 150)), ('zebra.jpg', None))
    """
    found = _BOX.fullmatch(path) if "#" in path else None
    if found is None:
        return path, None
    left, top, width, height = map(int, found.groups()[1:])
    return found[1], (left, top, width, height)


def file_of(path: str) -> str:
    """Return the file of a path that may have a box, or be a member of a tar file."""
    path = split_box(path)[0]
    member = split_member(path)
    return path if member is None else member[0]


def join_box(path: str, box: Box | None) -> str:
    """Return the path of a box in a file, or of the whole file."""
    return path if box is None else f"{path}#xywh={','.join(map(str, box))}"
