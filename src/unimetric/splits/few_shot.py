"""Few pictures of each training class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table
from unimetric.splits.standard import standard


def few_shot(table: Table, *, shots: int = 1, validation: float = 0.0, seed: int = 0) -> Split:
    """Few-shot metric learning (PUMA, Kim et al. 2023, fig. 6): training classes with k pictures each, test classes as ever.

    The pictures are drawn without replacement; a class with fewer than k has some of them again, as in the authors' code, so that every
    class counts the same. The first of k shots are those of fewer shots with the same seed.

    Args:
        table: the dataset, or the union of several.
        shots: pictures of a training class; the paper has 1, 2, 4, 8 and 16.
        validation: share of the training classes held out to choose the best epoch, with all their pictures; 0 for none.
        seed: which pictures, and which classes are held out.
    """
    if shots < 1:
        raise UnimetricError(f"few_shot: `shots` is {shots}", "write how many pictures a training class has, such as `few_shot(shots=4)`")
    split = standard(table, validation=validation, seed=seed)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(split.train)
    order = np.argsort(table.labels[shuffled], kind="stable")  # class by class, each in random order
    rows, (starts, sizes) = shuffled[order], np.unique(table.labels[shuffled[order]], return_index=True, return_counts=True)[1:]
    place = np.arange(shots)[None] % sizes[:, None]
    return replace(split, train=np.sort(rows[starts[:, None] + place].ravel()), name=f"few_shot({shots})")
