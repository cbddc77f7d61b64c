"""Near-duplicate images by the signs of the differences of neighboring pixels.

Numpy and Pillow only.

A hash has 256 bits. Copies of an image at another size or quality differ in few of them; images of
different scenes differ in about half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
from PIL import Image

from unimetric.errors import UnimetricError
from unimetric.images.pack import count_cores, decode, map_in_order
from unimetric.images.remote import Unreachable
from unimetric.images.table import Table

#: Largest number of different bits of near-duplicates.
NEAR = 24
_SIDE = 16


def hash_image(pixels: np.ndarray) -> np.ndarray:
    """Return the (256,) bool hash of an image (H, W, 3)."""
    small = Image.fromarray(pixels).convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX)
    gray = np.asarray(small, np.int16)
    return (gray[:, 1:] > gray[:, :-1]).ravel()


def hash_images(paths: Sequence[str], *, progress: Callable[[int, int], None] | None = None) -> np.ndarray:
    """Return the (N, 256) hashes of images.

    Those of an image that cannot be read are 0.5, which is half different from any other. Reading it for another purpose
    raises an error, or skips it.

    Args:
        paths: Paths of the images, as in `Table.paths`.
        progress: Callback with (finished images, all images).
    """

    def hash_readable(path: str) -> np.ndarray | float:
        try:
            return hash_image(decode(path))
        except Unreachable:
            raise
        except UnimetricError:
            return 0.5

    hashes = np.empty((len(paths), _SIDE**2), np.float16)
    with closing(map_in_order(hash_readable, paths, count_cores())) as results:
        for row, result in enumerate(results):
            hashes[row] = result
            if progress is not None:
                progress(row + 1, len(paths))
    return hashes


def find_duplicates(some: np.ndarray, others: np.ndarray, *, near: int = NEAR) -> np.ndarray:
    """Return the index of each image's near-duplicate among the others, or -1.

    If there are several, it is the nearest one.

    Args:
        some: (N, 256) hashes.
        others: (M, 256) hashes.
        near: Largest number of different bits.
    """
    found = np.full(len(some), -1, np.int64)
    if not len(others):
        return found
    # The product of two vectors of +1 and -1 counts their different entries, exactly in float32.
    signs = 2 * others.astype(np.float32) - 1
    step = max(1, (1 << 24) // len(others))
    for start in range(0, len(some), step):
        equal = (2 * some[start : start + step].astype(np.float32) - 1) @ signs.T
        nearest = equal.argmax(1)
        close = _SIDE**2 - equal[np.arange(len(nearest)), nearest] <= 2 * near
        found[start : start + step] = np.where(close, nearest, -1)
    return found


def describe_duplicates(table: Table, queries: np.ndarray, train: np.ndarray, *, progress: Callable[[int, int], None] | None = None) -> str:
    """Return a warning if over 1 % of the queries have a near-duplicate in training, or "".

    Args:
        table: Table of the images.
        queries: Rows of the queries.
        train: Training rows.
        progress: Callback with (finished images, all images).
    """
    train = np.unique(train)
    rows = np.concatenate([queries, train])
    hashes = hash_images([table.paths[row] for row in rows], progress=progress)
    found = find_duplicates(hashes[: len(queries)], hashes[len(queries) :])
    count = int((found >= 0).sum())
    if count <= 0.01 * len(queries):
        return ""
    first = int(np.flatnonzero(found >= 0)[0])
    return (
        f"{count:,} of {len(queries):,} queries have a near-duplicate in the training images, the first: "
        f"{table.paths[queries[first]]} and {table.paths[train[found[first]]]}; `split=by_similarity` leaves such training images out"
    )
