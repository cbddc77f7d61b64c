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
    Those of known classes keep their roles. Metrics of open sets (`fpir`, `fnir`, `auroc`, `baks`, `baus`)
    read both; means over queries, such as recall, are those of the known classes.

    Reference:
        Toward open set recognition (Scheirer et al., TPAMI 2013).

    Args:
        table: Table of the dataset.
        unknown: Fraction of the test classes that are not in the gallery.
        validation: Fraction of the training classes used to select the best epoch and a threshold.
        seed: Seed of the choice of unknown and of validation classes.
    """
    split = standard(table, validation=validation, seed=seed)
    classes = np.unique(table.labels[split.test])
    wanted = max(1, round(unknown * len(classes)))
    if len(classes) - wanted < 1:
        raise UnimetricError(
            f"{table.full_name}: an open set needs a known test class, but {wanted} of {len(classes)} are unknown",
            "use a smaller `unknown`",
        )
    chosen = np.random.default_rng(seed).permutation(classes)[:wanted]
    outside = np.zeros(len(table), bool)
    outside[split.test] = np.isin(table.labels[split.test], chosen)
    return replace(split, name=f"open_set({unknown})", query=table.query | outside, gallery=table.gallery & ~outside)
