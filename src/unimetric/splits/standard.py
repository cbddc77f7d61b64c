"""Training classes and test classes as the dataset has them."""

from __future__ import annotations

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table


def standard(table: Table, *, validation: float = 0.0, seed: int = 0) -> Split:
    """The published division of a dataset, with test classes that training never sees (Oh Song et al., CVPR 2016).

    Validation classes are taken out of the training classes, so that settings and the best epoch can be chosen without a look at the
    test classes (Kan et al., NeurIPS 2022, hold out 0.2). They are drawn evenly among those with two pictures at least.

    Args:
        table: the dataset.
        validation: share of the training classes that choose the best epoch instead of being trained on; 0 for none.
        seed: which classes are drawn.
    """
    if not 0 <= validation < 1:
        raise UnimetricError(
            f"standard: `validation` is {validation}", "write a share of the training classes, such as `standard(validation=0.2)`"
        )
    train, test = np.flatnonzero(table.train), np.flatnonzero(~table.train)
    classes, counts = np.unique(table.labels[train], return_counts=True)
    for part, rows in (("training", train), ("test", test)):
        number = len(np.unique(table.labels[rows]))
        if number < 2:
            raise UnimetricError(
                f"{_called(table)}: too few {part} classes ({number}); two are the least that can be told apart",
                "check how the dataset is divided; a folder or csv file gives a share of its classes to training with `train=0.5`",
            )
    both = np.intersect1d(classes, table.labels[test])
    if len(both):
        raise UnimetricError(
            f"{_called(table)}: {len(both):,} of {len(table.class_names):,} classes are in training and in test, "
            f"the first is `{table.class_names[both[0]]}`",
            "test classes must be new ones; a folder or csv file is divided by class with `train=0.5`",
        )
    held_out = np.zeros(len(table.class_names), bool)
    if validation:
        wanted = max(2, round(validation * len(classes)))
        eligible = classes[counts >= 2]
        if wanted > min(len(eligible), len(classes) - 2):
            raise UnimetricError(
                f"{_called(table)}: {wanted} validation classes are too many, of {len(classes)} training classes "
                f"({len(eligible)} of them with two pictures or more)",
                "write a smaller `validation`, or 0 for none; two classes at least must be left to train on",
            )
        held_out[np.random.default_rng(seed).permutation(eligible)[:wanted]] = True
    chosen = held_out[table.labels[train]]
    split = Split(train=train[~chosen], validation=train[chosen], test=test)
    for part, rows in (("validation", split.validation), ("test", split.test)):
        _answerable(table, part, rows)
    return split


def _answerable(table: Table, part: str, rows: np.ndarray) -> None:
    """Stop unless something asks, and everything that asks could find one of its class other than itself."""
    if not len(rows):
        return
    labels, query, gallery = table.labels[rows], table.query[rows], table.gallery[rows]
    if not query.any() or not gallery.any():
        raise UnimetricError(f"{_called(table)}: no {part} picture is a {'gallery' if query.any() else 'query'}", "mark some as such")
    answers = np.bincount(labels[gallery], minlength=len(table.class_names))[labels] - gallery
    lost = query & (answers == 0)
    if lost.any():
        first = table.class_names[labels[np.flatnonzero(lost)[0]]]
        raise UnimetricError(
            f"{_called(table)}: {lost.sum():,} of {len(rows):,} {part} pictures ask for a class that no other gallery picture has, "
            f"the first for `{first}`",
            "a class that is tested needs two pictures; add one, or leave the class out",
        )


def _called(table: Table) -> str:
    return " + ".join(name for name in table.source_names if name) or "the dataset"
