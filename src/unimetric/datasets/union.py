"""Several datasets as one."""

from __future__ import annotations

from typing import Annotated

from unimetric.arguments import Range
from unimetric.images import table
from unimetric.images.table import Table
from unimetric.spec import create


def union(*, parts: Annotated[list[str], Range(1)]) -> Table:
    """Several datasets as one, for one embedding of all of them.

        union(parts=["cub200", "cars196(root='cars')"])

    A class is named `dataset/class`, and keeps its training or test part.

    Differs from the authors' code:
        There, test labels of different datasets collide. Here every (dataset, class) has a unique
        id.

    Reference:
        Universal metric learning (Kim et al., 2023).

    Args:
        parts: Spec strings of the datasets, each at most once.
    """
    return table.union([create("datasets", part) for part in parts])
