"""Few images of each training class."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np

from unimetric.arguments import Count, Range, Seed
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def few_shot(table: Table, *, shots: Count = 1, validation: Annotated[float, Range(0, below=1)] = 0.0, seed: Seed = 0) -> Split:
    """Training classes with k images each, and the standard test classes.

    Images are drawn without replacement. A class with fewer than k images repeats some of them, as
    in the authors' code, so that every class has the same weight. With the same seed, fewer shots
    are a subset of more.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023),
        section 5.2 and fig. 6.

    Args:
        table: Table of the dataset, or the union of several.
        shots: Number of images per training class. The paper uses 1, 2, 4, 8 and 16.
        validation: Fraction of the training classes held out to select the best epoch, with all
            their images. 0 for none.
        seed: Seed of the images, and of the held-out classes.
    """
    split = standard(table, validation=validation, seed=seed)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(split.train)
    order = np.argsort(table.labels[shuffled], kind="stable")  # class by class, each in random order
    rows = shuffled[order]
    _, starts, sizes = np.unique(table.labels[rows], return_index=True, return_counts=True)
    index = np.arange(shots)[None] % sizes[:, None]
    return replace(split, train=np.sort(rows[starts[:, None] + index].ravel()), name=f"few_shot({shots})")
