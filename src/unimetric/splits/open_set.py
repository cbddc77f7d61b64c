"""Test classes of which some are not in the gallery."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np

from unimetric.arguments import Range, Seed
from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def open_set(
    table: Table,
    *,
    unknown: Annotated[float, Range(above=0, below=1)] = 0.5,
    validation: Annotated[float, Range(0, below=1)] = 0.0,
    seed: Seed = 0,
) -> Split:
    """Standard split, with queries of known and of unknown test classes.

    The images of unknown classes are queries and not in the gallery, so no query of them has a match.
    Those of known classes keep their roles. Validation classes are divided likewise. Metrics of open sets
    (`fpir`, `fnir`, `auroc`, `baks`, `baus`) read both; means over queries, such as recall, are those of
    the known classes.

    Reference:
        Toward open set recognition (Scheirer et al., TPAMI 2013).

    Args:
        table: Table of the dataset.
        unknown: Fraction of the test classes, and of the validation classes, that are not in the gallery.
        validation: Fraction of the training classes used to select the best epoch and a threshold.
        seed: Seed of the choice of unknown and of validation classes.
    """
    split = standard(table, validation=validation, seed=seed)
    dice = np.random.default_rng(seed)
    outside = np.zeros(len(table), bool)
    for part in ("test", "validation"):
        rows = getattr(split, part)
        classes = np.unique(table.labels[rows])
        wanted = max(1, round(unknown * len(classes)))
        if len(rows) and wanted == len(classes):
            raise UnimetricError(
                f"{table.full_name}: an open set needs a known {part} class, but {wanted} of {len(classes)} are unknown",
                "use a smaller `unknown`" + (", or more `validation` classes" if part == "validation" else ""),
            )
        outside[rows] = np.isin(table.labels[rows], dice.permutation(classes)[:wanted])
    return replace(split, name=f"open_set({unknown})", query=table.query | outside, gallery=table.gallery & ~outside)
