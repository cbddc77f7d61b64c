"""Flowers-102: flowers common in Britain."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import locate, matlab, need
from unimetric.datasets._tabulate import tabulate
from unimetric.images.table import Table

LAYOUT = "imagelabels.mat and jpg/"


def flowers102(*, root: str = "data/flowers102", on_missing: Literal["error", "skip"] = "error") -> Table:
    """Flowers-102: flowers common in Britain.

        classes 1-51 train (3,493 images), 52-102 test (4,696)

    The split is that of PUMA (Kim et al., 2023) and uses all images. The official `setid.mat`
    divides every class into three parts and is not read. The files contain no flower names, so a
    class is named by its number.

    Reference:
        Automated flower classification over a large number of classes (Nilsback and Zisserman,
        ICVGIP 2008).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "flowers102", LAYOUT)
    (labels,) = matlab(need(folder, "imagelabels.mat", layout=LAYOUT), "labels")
    images = need(folder, "jpg", layout=LAYOUT)
    keys = [int(label) for label in labels]
    names = {key: str(key) for key in sorted(set(keys))}
    paths = [f"{images}/image_{number:05}.jpg" for number in range(1, len(keys) + 1)]
    return tabulate("flowers102", paths, keys, names, [key <= 51 for key in keys], on_missing=on_missing)
