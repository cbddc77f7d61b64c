"""Training classes and test classes as published with the dataset."""

from __future__ import annotations

import logging
from typing import Annotated

import numpy as np

from unimetric.arguments import Range, Seed
from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table, describe_shared


def standard(table: Table, *, validation: Annotated[float, Range(0, below=1)] = 0.0, known_classes: bool = False, seed: Seed = 0) -> Split:
    """Published split of a dataset, with test classes disjoint from the training classes.

    Validation classes are taken from the training classes, so that settings and the best epoch can
    be selected without the test classes (Kan et al., NeurIPS 2022, hold out 0.2). They are drawn
    uniformly from the classes with at least two images.

    Reference:
        Deep metric learning via lifted structured feature embedding (Oh Song et al., CVPR 2016).

    Args:
        table: Table of the dataset.
        validation: Fraction of the training classes used to select the best epoch instead of for
            training. 0 for none.
        known_classes: Whether a test class may be a training class, as for a classifier. Results then
            do not predict those on new classes.
        seed: Seed of the choice of validation classes.
    """
    train, test = np.flatnonzero(table.train), np.flatnonzero(~table.train)
    classes, counts = np.unique(table.labels[train], return_counts=True)
    for part, rows in (("training", train), ("test", test)):
        number = len(np.unique(table.labels[rows]))
        if number < 2:
            hint = "check the split of the dataset; for a folder or csv file, set the fraction of training classes with `train=0.5`"
            if len(np.unique(table.labels)) < 4:
                hint = "add classes until there are at least four: two to train on, and two to test on"
            raise UnimetricError(f"{table.full_name}: a split needs at least 2 {part} classes, got {number}", hint)
    both = describe_shared(table)
    if both and not known_classes:
        raise UnimetricError(
            both,
            "split a folder or csv file by class with `train=0.5`, or evaluate on known classes with `split=standard(known_classes=True)`",
        )
    if both:
        logging.getLogger("unimetric").warning("%s; the test results do not predict those on new classes", both)
    held_out = np.zeros(len(table.class_names), bool)
    if validation:
        wanted = max(2, round(validation * len(classes)))
        eligible = classes[counts >= 2]
        if wanted > min(len(eligible), len(classes) - 2):
            raise UnimetricError(
                f"{table.full_name}: {wanted} validation classes are too many for {len(classes)} training classes "
                f"({len(eligible)} of them with at least two images)",
                "use a smaller `validation`, or 0 for none; at least two classes must remain for training",
            )
        held_out[np.random.default_rng(seed).permutation(eligible)[:wanted]] = True
    chosen = held_out[table.labels[train]]
    split = Split(train=train[~chosen], validation=train[chosen], test=test)
    for part, rows in (("validation", split.validation), ("test", split.test)):
        _check_queries(table, part, rows)
    return split


def _check_queries(table: Table, part: str, rows: np.ndarray) -> None:
    """Raise an error if there are no queries, or if a query has no match in the gallery.

    A match is another gallery image of its class.
    """
    if not len(rows):
        return
    labels, query, gallery = table.labels[rows], table.query[rows], table.gallery[rows]
    if not query.any() or not gallery.any():
        role = "gallery" if query.any() else "query"
        raise UnimetricError(
            f"{table.full_name}: at least one {part} image must be a {role} image, got none", f"mark some images as {role}"
        )
    answers = np.bincount(labels[gallery], minlength=len(table.class_names))[labels] - gallery
    lost = query & (answers == 0)
    if lost.any():
        first = table.class_names[labels[np.flatnonzero(lost)[0]]]
        raise UnimetricError(
            f"{table.full_name}: each query needs another gallery image of its class, but {lost.sum():,} of {len(rows):,} {part} images "
            f"have none, the first of class `{first}`",
            "a test class needs two images; add one, or remove the class",
        )
