"""Several datasets as one."""

from __future__ import annotations

from unimetric.errors import UnimetricError
from unimetric.images import table
from unimetric.images.table import Table
from unimetric.spec import create


def union(*, parts: list[str]) -> Table:
    """Universal metric learning (Kim et al., 2023): one embedding for several datasets at once.

        union(parts=["cub200", "cars196(root='cars')"])

    A class is called `dataset/class`, and keeps its training or test part. Differs from the authors' code, in which test labels of
    different datasets collide: here every (dataset, class) has an id of its own.

    Args:
        parts: the datasets, each written as it would be by itself; no dataset twice.
    """
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, str) for part in parts):
        raise UnimetricError(f"union: `parts` is {parts!r}", "write a list of datasets, such as `union(parts=['cub200', 'cars196'])`")
    return table.union([create("datasets", part) for part in parts])
