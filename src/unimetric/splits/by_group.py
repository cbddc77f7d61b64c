"""No camera, encounter, video or day in both training and test."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated

import numpy as np

from unimetric.arguments import Range, Seed
from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def by_group(table: Table, *, validation: Annotated[float, Range(0, below=1)] = 0.0, known_classes: bool = False, seed: Seed = 0) -> Split:
    """Standard split without the training images that share a group with a held-out image.

    Images of one encounter, video or day show the same background and light. If they are in training
    and in test, a model that has memorized them scores better than it will on new ones. Training images
    that share a group with a test or validation image are left out, and validation images that share one
    with a test image. Images without a group stay.

    Reference:
        Recognition in terra incognita (Beery et al., ECCV 2018), whose sequences and locations are not divided.

    Args:
        table: Table of the dataset, with groups.
        validation: Fraction of the training classes used to select the best epoch. 0 for none.
        known_classes: Whether a test class may be a training class.
        seed: Seed of the choice of validation classes.
    """
    if not table.group_names:
        raise UnimetricError(
            f"{table.full_name}: `by_group` needs groups, got none", "add a column `group`, `camera`, `sequence`, `encounter` or `date`"
        )
    split = standard(table, validation=validation, known_classes=known_classes, seed=seed)
    kept = drop_shared(table, split)
    dropped = len(split.train) + len(split.validation) - len(kept.train) - len(kept.validation)
    if dropped:
        message = "%s: %s training and validation images share a group with a held-out image; they are left out"
        logging.getLogger("unimetric").warning(message, table.full_name, f"{dropped:,}")
    for part in ("train", "validation") if len(split.validation) else ("train",):
        classes = len(np.unique(table.labels[getattr(kept, part)]))
        if classes < 2:
            raise UnimetricError(
                f"{table.full_name}: at least 2 {part} classes must have images of other groups than the held-out images, got {classes}",
                "use smaller groups, such as encounters instead of cameras",
            )
    if len(split.validation) and np.bincount(table.labels[kept.validation]).max() < 2:
        raise UnimetricError(
            f"{table.full_name}: a validation class must have at least 2 images of other groups than the test images, got at most 1",
            "use another `seed`, a larger `validation`, or 0 for none",
        )
    return replace(kept, name="by_group")


def drop_shared(table: Table, split: Split) -> Split:
    """Return a split whose training, validation and test images have no group in common.

    Args:
        table: Table of the images.
        split: Rows of training, validation and test.
    """

    def without(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        groups = table.group[others]
        return rows[~np.isin(table.group[rows], groups[groups >= 0])]

    validation = without(split.validation, split.test)
    return replace(split, train=without(split.train, np.concatenate([validation, split.test])), validation=validation)
