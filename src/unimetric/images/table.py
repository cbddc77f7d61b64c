"""What a dataset is to the rest of the house: a table of pictures, and its division into parts. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unimetric.errors import UnimetricError


@dataclass(frozen=True, eq=False)  # a table is itself: arrays have no single truth to compare by
class Table:
    """Pictures and what is known of them, one row a picture.

    Args:
        paths: where each picture lies: a file, or `FILE.pack::ROW` for a picture inside a pack.
        labels: (N,) int64, row of `class_names`.
        class_names: one name a class; unique, so that (dataset, class) never collides.
        train: (N,) bool, the published division into training classes and others.
        query: (N,) bool, pictures that ask; all, unless the dataset has a query/gallery protocol.
        gallery: (N,) bool, pictures that answer.
        source: (N,) int64, row of `source_names`: which dataset a picture came from.
        source_names: one name a dataset.
    """

    paths: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]
    train: np.ndarray
    query: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    gallery: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    source: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    source_names: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        rows = len(self.paths)
        set_ = object.__setattr__  # the class is frozen; only its own start may fill defaults in
        set_(self, "labels", np.asarray(self.labels, np.int64))
        set_(self, "train", np.asarray(self.train, bool))
        for name, kind in (("query", bool), ("gallery", bool), ("source", np.int64)):
            value = np.asarray(getattr(self, name), kind)
            if len(value) == 0 and rows:
                value = np.ones(rows, bool) if kind is bool else np.zeros(rows, np.int64)
            set_(self, name, value)
        for name in ("labels", "train", "query", "gallery", "source"):
            if len(getattr(self, name)) != rows:
                raise ValueError(f"Table.{name} has {len(getattr(self, name))} rows, paths has {rows}")
        if len(set(self.class_names)) != len(self.class_names):
            raise ValueError("Table.class_names are not unique")
        if rows and not (self.labels.min() >= 0 and self.labels.max() < len(self.class_names)):
            raise ValueError("Table.labels point outside class_names")
        if rows and not (self.source.min() >= 0 and self.source.max() < len(self.source_names)):
            raise ValueError("Table.source points outside source_names")

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: np.ndarray | Sequence[int] | Sequence[bool]) -> Table:
        """Some of the rows, by number or by a mask; classes keep their numbers, also those that lose all their pictures."""
        rows = np.asarray(rows)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        return replace(
            self,
            paths=tuple(self.paths[row] for row in rows),
            **{name: getattr(self, name)[rows] for name in ("labels", "train", "query", "gallery", "source")},
        )


def union(tables: Sequence[Table]) -> Table:
    """Several datasets as one, with (dataset, class) ids that cannot collide.

    Class names become `dataset/class`; a dataset that is there twice is refused, since its classes would be two of each.
    """
    if not tables:
        raise UnimetricError("a union of no datasets", "name one dataset at least")
    names = [name for table in tables for name in table.source_names]
    if len(set(names)) != len(names):
        raise UnimetricError(
            f"the datasets {', '.join(names)} are not all different",
            "name each dataset once; a folder or csv file can be given another name with `name='...'`",
        )
    labels, source, classes = [], [], 0
    for number, table in enumerate(tables):
        labels.append(table.labels + classes)
        source.append(table.source + sum(len(t.source_names) for t in tables[:number]))
        classes += len(table.class_names)

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(table, name) for table in tables])

    return Table(
        paths=tuple(path for table in tables for path in table.paths),
        labels=np.concatenate(labels),
        class_names=tuple(
            name if len(table.source_names) > 1 else f"{table.source_names[0]}/{name}" for table in tables for name in table.class_names
        ),
        train=join("train"),
        query=join("query"),
        gallery=join("gallery"),
        source=np.concatenate(source),
        source_names=tuple(names),
    )


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of a `Table`: what is trained on, what the best epoch is chosen on, what is reported.

    Args:
        train: rows to train on.
        validation: rows of other classes than `train`, to choose the best epoch on; may be empty.
        test: rows of classes never seen.
        name: what to call it in a report.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    name: str = "standard"

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))
