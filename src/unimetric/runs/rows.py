"""The images of a run: its dataset, its split, and the rows that can be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.images.loading import Progress, find_bad
from unimetric.images.pack import located
from unimetric.images.table import Split, Table
from unimetric.spec import bind, create


def read_table(config: RunConfig) -> tuple[Table, Split]:
    """Read the dataset of a run, and its rows of training, validation and test."""
    table: Table = create("datasets", config.dataset)
    split = make_split(config, table)
    return split.assign(table), split


def make_split(config: RunConfig, table: Table) -> Split:
    """Return the rows of a table for training, validation and test."""
    part, arguments = bind("splits", config.split, seed=config.seed)
    return part(table, **arguments)


def readable(
    config: RunConfig, table: Table, rows: np.ndarray, *, progress: Progress | None = None
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Remove the images that cannot be read, if `on_bad_picture` is `skip`.

    Packs contain no such images.

    Args:
        config: Settings of the run.
        table: Table of the images.
        rows: Indices of the rows to check.
        progress: Callback with (finished images, all images).

    Returns:
        The remaining rows, and path and reason of each skipped image.

    Raises:
        UnimetricError: Fewer than two classes remain.
    """
    if config.on_bad_picture != "skip" or not len(rows) or all(map(located, table.paths)):
        return rows, []
    unique = np.unique(rows)
    bad = find_bad(table.take(unique), workers=config.workers, progress=progress)
    skipped = [(table.paths[unique[row]], reason) for row, reason in bad]
    kept = rows[~np.isin(rows, unique[[row for row, _ in bad]])]
    if len(np.unique(table.labels[kept])) < 2:
        raise UnimetricError(
            f"`dataset = {config.dataset!r}`: at least two training and two test classes must be left without the {len(bad)} images "
            f"that cannot be read; the first: {': '.join(skipped[0]) if skipped else 'none'}",
            "replace these images",
        )
    return kept, skipped


def read_watched(config: RunConfig) -> dict[str, Table]:
    """Read the other datasets of a run, and return the tables of their standard test classes.

    Args:
        config: Settings of the run; see `watch_datasets`.
    """
    found = {}
    for text in config.watch_datasets:
        table, split = read_table(replace(config, dataset=text, split="standard"))
        rows, _ = readable(config, table, split.test)
        found[text] = table.take(rows)
    return found
