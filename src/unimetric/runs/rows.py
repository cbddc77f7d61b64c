"""The images of a run: its dataset, its split, and the rows that can be read."""

from __future__ import annotations

import numpy as np

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.images.loading import Progress, find_bad
from unimetric.images.pack import located
from unimetric.images.table import Split, Table
from unimetric.spec import bind, create


def read_table(config: RunConfig) -> tuple[Table, Split]:
    """The dataset, and which of its rows train and test."""
    table: Table = create("datasets", config.dataset)
    return table, make_split(config, table)


def make_split(config: RunConfig, table: Table) -> Split:
    """Which rows of a table train and test."""
    part, arguments = bind("splits", config.split, seed=config.seed)
    return part(table, **arguments)


def readable(
    config: RunConfig, table: Table, rows: np.ndarray, *, progress: Progress | None = None
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Those rows that can be read, where the settings say so, and (path, reason) of the others. Packs were checked when they were made."""
    if config.on_bad_picture != "skip" or not len(rows) or all(map(located, table.paths)):
        return rows, []
    each = np.unique(rows)
    bad = find_bad(table.take(each), workers=config.workers, progress=progress)
    kept = rows[~np.isin(rows, each[[row for row, _ in bad]])]
    if len(np.unique(table.labels[kept])) < 2:
        raise UnimetricError(
            f"`dataset = {config.dataset!r}`: too few classes are left without the {len(bad)} pictures that cannot be read; "
            f"the first: {bad[0][1] if bad else 'none'}",
            "mend them; two classes to train on and two to test on are the least",
        )
    return kept, [(table.paths[each[row]], reason) for row, reason in bad]
