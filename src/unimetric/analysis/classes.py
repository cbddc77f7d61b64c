"""Results of each class: recall@1, number of queries, and most frequent wrong class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unimetric.geometry.space import Space


def results_by_class(space: Space, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the recall@1 of each class with queries that have a match, lowest first.

    Args:
        space: Embeddings.
        names: Name of the class of each row of the space.

    Returns:
        One dictionary per class: `class`, `queries`, `recall`, and `confused_with`, the class of most wrong nearest neighbors, which
        is empty if there are none.
    """
    labels = space.labels.cpu().numpy()
    first = np.unique(labels, return_index=True)[1]
    query = space.query[space.matched].cpu().numpy()
    nearest = space.neighbors(1)[space.matched, 0].cpu().numpy()
    asked, found = labels[query], labels[nearest]
    count = np.bincount(asked, minlength=space.classes)
    right = np.bincount(asked[asked == found], minlength=space.classes)
    wrong, times = np.unique(np.stack([asked, found])[:, asked != found], axis=1, return_counts=True)
    confused: dict[int, str] = {}
    for place in np.argsort(-times, kind="stable"):
        confused.setdefault(int(wrong[0, place]), str(names[first[wrong[1, place]]]))
    rows = [
        {
            "class": str(names[first[each]]),
            "queries": int(count[each]),
            "recall": float(right[each] / count[each]),
            "confused_with": confused.get(int(each), ""),
        }
        for each in np.flatnonzero(count)
    ]
    return sorted(rows, key=lambda row: (row["recall"], -row["queries"]))
