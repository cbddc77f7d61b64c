"""Flowers-102: flowers that are common in Britain."""

from __future__ import annotations

from unimetric.datasets._reading import locate, matlab, need
from unimetric.datasets._tabulate import tabulate
from unimetric.images.table import Table

LAYOUT = "imagelabels.mat and jpg/"


def flowers102(*, root: str = "data/flowers102", on_missing: str = "error") -> Table:
    """Automated flower classification over a large number of classes (Nilsback and Zisserman, ICVGIP 2008).

        classes 1-51 train (3,493 pictures), 52-102 test (4,696)

    The division is that of PUMA (Kim et al., 2023) and takes all pictures; the official `setid.mat` divides every class in three and is
    not read. The files have no names of flowers, so a class is called by its number.

    Args:
        root: the official folder.
        on_missing: `error` where a listed picture is absent, or `skip` it.
    """
    folder = locate(root, "flowers102", LAYOUT)
    (labels,) = matlab(need(folder, "imagelabels.mat", layout=LAYOUT), "labels")
    images = need(folder, "jpg", layout=LAYOUT)
    keys = [int(label) for label in labels]
    names = {key: str(key) for key in sorted(set(keys))}
    paths = [f"{images}/image_{number:05}.jpg" for number in range(1, len(keys) + 1)]
    return tabulate("flowers102", paths, keys, names, [key <= 51 for key in keys], on_missing=on_missing)
