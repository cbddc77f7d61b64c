"""Training and gallery before a date, queries after it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated

import numpy as np

from unimetric.arguments import Range, Seed
from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def by_time(
    table: Table,
    *,
    until: str = "",
    fraction: Annotated[float, Range(above=0, below=1)] = 0.5,
    validation: Annotated[float, Range(0, below=1)] = 0.0,
    known_classes: bool = False,
    seed: Seed = 0,
) -> Split:
    """Standard split in time: training and gallery images up to a date, queries after it.

    A deployed gallery is older than its queries. Images of one day look alike, so a query finds its class
    more easily among images of the same day. Here no day is on both sides.

    Reference:
        WildlifeDatasets: an open-source toolkit for animal re-identification (Cermak et al., WACV 2024),
        time-aware splits.

    Args:
        table: Table of the dataset, whose groups are dates such as `2019-06-30` or years. The time of a date is not used.
        until: Last date of training and gallery. Defaults to the date that `fraction` implies.
        fraction: Fraction of the test images up to the date, at most.
        validation: Fraction of the training classes used to select the best epoch. 0 for none.
        known_classes: Whether a test class may be a training class.
        seed: Seed of the choice of validation classes.
    """
    split = standard(table, validation=validation, known_classes=known_classes, seed=seed)
    dates = np.array([parse_date(name, table.full_name) for name in table.group_names], "datetime64[s]").astype("datetime64[D]")
    missing = np.flatnonzero(table.group < 0)
    if len(missing):
        raise UnimetricError(
            f"{table.full_name}: `by_time` needs the date of every image, but {len(missing):,} of {len(table):,} have none, the first is "
            f"`{table.paths[missing[0]]}`",
            "add a column `date`, and `group='date'` if there are other columns of groups",
        )
    when = dates[table.group]
    days = np.unique(when[split.test])
    if until:
        last = np.datetime64(parse_date(until, "until"), "s").astype("datetime64[D]")
    else:
        early = np.array([(when[split.test] <= day).mean() for day in days])
        last = days[max(0, int((early <= fraction).sum()) - 1)]
    before = when <= last
    if not before[split.test].any() or before[split.test].all():
        raise UnimetricError(
            f"{table.full_name}: test images must be before and after {last}, got {len(days)} date(s) from {days[0]} to {days[-1]}",
            f"use a date in between, such as `until='{days[len(days) // 2]}'`",
        )
    train = split.train[before[split.train]]
    if len(np.unique(table.labels[train])) < 2:
        raise UnimetricError(f"{table.full_name}: at least 2 training classes must have images up to {last}", "use a later date")
    query, gallery = table.query.copy(), table.gallery.copy()
    query[split.test] &= ~before[split.test]
    gallery[split.test] &= before[split.test]
    if not _has_match(table, split.test, when, last):
        usable = [day for day in days if _has_match(table, split.test, when, day)]
        raise UnimetricError(
            f"{table.full_name}: a test class must have a gallery image up to {last} and a query after it, got none",
            f"use another date: `until='{usable[len(usable) // 2]}'`" if usable else "add test classes with images of several dates",
        )
    return replace(split, train=train, name=f"by_time({last})", query=query, gallery=gallery)


def _has_match(table: Table, rows: np.ndarray, when: np.ndarray, last: np.datetime64) -> bool:
    """Return whether a query after a date has a gallery image of its class up to the date."""
    late, early = rows[table.query[rows] & (when[rows] > last)], rows[table.gallery[rows] & (when[rows] <= last)]
    return bool(np.isin(table.labels[late], table.labels[early]).any())


def parse_date(text: str, where: str) -> datetime:
    """Return the time of a date in ISO format, or of a year.

    >>> parse_date("2019", "whales"), parse_date("2019-06-30", "whales")
    (datetime.datetime(2019, 1, 1, 0, 0), datetime.datetime(2019, 6, 30, 0, 0))
    """
    try:
        if text.isdecimal() and len(text) == 4:
            return datetime(int(text), 1, 1)
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise UnimetricError(f"{where}: a date must be written as 2019-06-30, got `{text}`", "write year, month and day") from None
