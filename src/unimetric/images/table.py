"""Table of images, the interface between datasets and the rest, and splits of its rows.

Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unimetric.errors import UnimetricError

#: Columns of a table, one value per image.
COLUMNS = ("labels", "train", "query", "gallery", "source", "group")


@dataclass(frozen=True, eq=False)  # equality by identity, because comparing arrays gives arrays
class Table:
    """Images and their annotations, one row per image.

    Args:
        paths: Path of each image: a file, `FILE#xywh=X,Y,WIDTH,HEIGHT` for a box in it, or `FILE.pack::ROW` for an
            image inside a pack.
        labels: (N,) int64 indices into `class_names`.
        class_names: One unique name per class, so that (dataset, class) never collides.
        train: (N,) bool mask of the training classes in the published split.
        query: (N,) bool mask of the queries. All images, unless the dataset has a query/gallery
            protocol.
        gallery: (N,) bool mask of the gallery.
        source: (N,) int64 indices into `source_names`: the dataset of each image.
        source_names: One name per dataset.
        group: (N,) int64 indices into `group_names`: the camera, encounter, video, patient or day of
            each image. -1 if it has none.
        group_names: One name per group.
        group_rule: Which gallery images of its group a query does not find: `class`, those of its own
            class; `group`, all; `none`. See `Space`.
    """

    paths: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]
    train: np.ndarray
    query: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    gallery: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    source: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    source_names: tuple[str, ...] = ("",)
    group: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    group_names: tuple[str, ...] = ()
    group_rule: str = "class"

    def __post_init__(self) -> None:
        rows = len(self.paths)
        set_ = object.__setattr__  # the class is frozen, but defaults are filled in here
        set_(self, "labels", np.asarray(self.labels, np.int64))
        set_(self, "train", np.asarray(self.train, bool))
        for name, kind, default in (("query", bool, True), ("gallery", bool, True), ("source", np.int64, 0), ("group", np.int64, -1)):
            value = np.asarray(getattr(self, name), kind)
            set_(self, name, np.full(rows, default, kind) if len(value) == 0 else value)
        for name in COLUMNS:
            if len(getattr(self, name)) != rows:
                raise ValueError(f"`Table.{name}` must have one value per path ({rows}), got {len(getattr(self, name))}")
        if len(set(self.class_names)) != len(self.class_names):
            raise ValueError("`Table.class_names` must be unique")
        if rows and not (self.labels.min() >= 0 and self.labels.max() < len(self.class_names)):
            raise ValueError("`Table.labels` must be indices into class_names")
        if rows and not (self.source.min() >= 0 and self.source.max() < len(self.source_names)):
            raise ValueError("`Table.source` must be indices into source_names")
        if rows and not (self.group.min() >= -1 and self.group.max() < len(self.group_names)):
            raise ValueError("`Table.group` must be indices into group_names, or -1")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def full_name(self) -> str:
        """Names of the datasets, for messages."""
        return " + ".join(name for name in self.source_names if name) or "the dataset"

    def take(self, rows: np.ndarray | Sequence[int] | Sequence[bool]) -> Table:
        """Return some of the rows, selected by number or by a mask.

        Classes keep their numbers, even if they lose all their images.
        """
        rows = np.asarray(rows)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        return replace(
            self,
            paths=tuple(self.paths[row] for row in rows),
            **{name: getattr(self, name)[rows] for name in COLUMNS},
        )


def union(tables: Sequence[Table]) -> Table:
    """Combine several datasets into one, with (dataset, class) ids that cannot collide.

    Class names become `dataset/class`. A repeated dataset is an error, because each of its classes
    would exist twice.
    """
    if not tables:
        raise UnimetricError("a union needs at least 1 dataset, got 0", "name at least one dataset")
    names = [name for table in tables for name in table.source_names]
    if len(set(names)) != len(names):
        raise UnimetricError(
            f"the datasets of a union must be different, got {', '.join(names)}",
            "name each dataset once; rename a folder or csv file with `name='...'`",
        )
    rules = {table.group_rule for table in tables if table.group_names}
    if len(rules) > 1:
        raise UnimetricError(
            f"the datasets of a union must have the same group rule, got {', '.join(sorted(rules))}", "set the same `group_rule` for all"
        )
    labels: list[np.ndarray] = []
    source: list[np.ndarray] = []
    group: list[np.ndarray] = []
    class_names: list[str] = []
    group_names: list[str] = []
    sources = 0
    for table in tables:
        labels.append(table.labels + len(class_names))
        source.append(table.source + sources)
        sources += len(table.source_names)
        group.append(np.where(table.group < 0, -1, table.group + len(group_names)))
        # The names of a union are prefixed already.
        prefix = "" if len(table.source_names) > 1 else f"{table.source_names[0]}/"
        class_names += [prefix + name for name in table.class_names]
        group_names += table.group_names

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(table, name) for table in tables])

    return Table(
        paths=tuple(path for table in tables for path in table.paths),
        labels=np.concatenate(labels),
        class_names=tuple(class_names),
        train=join("train"),
        query=join("query"),
        gallery=join("gallery"),
        source=np.concatenate(source),
        source_names=tuple(names),
        group=np.concatenate(group),
        group_names=tuple(group_names),
        group_rule=next(iter(rules), "class"),
    )


def describe_shared(table: Table) -> str:
    """Return a sentence about classes in both training and test, or "" if there are none."""
    both = np.intersect1d(table.labels[table.train], table.labels[~table.train])
    if not len(both):
        return ""
    return (
        f"{table.full_name}: {len(both):,} of {len(table.class_names):,} classes are in both training and test, "
        f"the first is `{table.class_names[both[0]]}`"
    )


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of a `Table` for training, for epoch selection and for the reported results.

    Args:
        train: Training rows.
        validation: Rows of other classes than `train`, used to select the best epoch. May be empty.
        test: Rows of unseen classes.
        name: Name of the split in a report.
        query: (N,) bool mask of the queries that replaces that of the table, or None.
        gallery: (N,) bool mask of the gallery that replaces that of the table, or None.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    name: str = "standard"
    query: np.ndarray | None = None
    gallery: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))

    def assign(self, table: Table) -> Table:
        """Return the table with the queries and the gallery of the split."""
        query = table.query if self.query is None else self.query
        return replace(table, query=query, gallery=table.gallery if self.gallery is None else self.gallery)

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Rows by name of the part."""
        return {"train": self.train, "validation": self.validation, "test": self.test}
