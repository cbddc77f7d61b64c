"""No near-duplicate of a test image in training."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated

import numpy as np

from unimetric.arguments import Range, Seed
from unimetric.errors import UnimetricError
from unimetric.images.duplicates import find_duplicates, hash_images
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def by_similarity(
    table: Table,
    *,
    near: Annotated[int, Range(0, 128)] = 24,
    validation: Annotated[float, Range(0, below=1)] = 0.0,
    known_classes: bool = False,
    seed: Seed = 0,
) -> Split:
    """Standard split without the training images that are near-duplicates of held-out images.

    Frames of one video and copies of one photo are near-duplicates. Every image is read once and
    described by 256 signs of differences of neighboring pixels, at 16 x 17 pixels. Near-duplicates have
    few different signs.

    Reference:
        Purging CIFAR of near-duplicates (Barz and Denzler, J. Imaging 2020).

    Args:
        table: Table of the dataset.
        near: Largest number of different signs of near-duplicates.
        validation: Fraction of the training classes used to select the best epoch. 0 for none.
        known_classes: Whether a test class may be a training class.
        seed: Seed of the choice of validation classes.
    """
    split = standard(table, validation=validation, known_classes=known_classes, seed=seed)
    hashes = hash_images(table.paths)
    held_out = np.concatenate([split.validation, split.test])
    kept = find_duplicates(hashes[split.train], hashes[held_out], near=near) < 0
    if not kept.all():
        message = "%s: %s of %s training images are near-duplicates of held-out images; they are left out"
        logging.getLogger("unimetric").warning(message, table.full_name, f"{(~kept).sum():,}", f"{len(kept):,}")
    if len(np.unique(table.labels[split.train[kept]])) < 2:
        raise UnimetricError(f"{table.full_name}: fewer than 2 training classes remain without near-duplicates", "use a smaller `near`")
    return replace(split, train=split.train[kept], name="by_similarity")
