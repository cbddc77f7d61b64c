"""Figure of training and test images of splits, as maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.projection import project
from unimetric.analysis.split import read_features
from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.spec import create
from unimetric.splits.ood import distances

#: Largest number of points, as in the paper.
_POINTS = 20_000


def class_maps(features: str | Path, out: str | Path, *, splits: str, dataset: str) -> tuple[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Draw the images of an easy, a medium and a hard split on a map of their features.

    Training and test images have different colors. The map is the same for all splits: UMAP if umap-learn is
    installed, otherwise the first two principal components.

    Reference:
        Figure 2 of the supplement of Characterizing generalization under out-of-distribution shifts in deep metric learning (Milbich et
        al., NeurIPS 2021).

    Args:
        features: An `.npz` file of `unimetric split --features`.
        out: PNG file.
        splits: File of splits.
        dataset: Dataset spec string of the features.

    Returns:
        Name of the projection, and the rows of the drawn training and test images of each split.
    """
    far = {number: distance for number, distance in distances(splits).items() if not number.startswith("key ")}
    if not far:
        raise UnimetricError(f"{splits}: no split is selected", "make the file with `unimetric split`")
    numbers = sorted(far, key=far.__getitem__)
    shown = list(dict.fromkeys([numbers[0], numbers[len(numbers) // 2], numbers[-1]]))
    table: Table = create("datasets", dataset)
    values = read_features(features, table)
    kept = np.random.default_rng(0).permutation(len(table))[:_POINTS]
    projection, points = project(values[kept])
    own = "key " in " ".join(distances(splits))
    drawn = {}
    with Canvas(out, width=4 * len(shown), height=4, rows=1, columns=len(shown)) as axes:
        for axis, number in zip(axes[0], shown, strict=True):
            split = create("splits", f"{'ood' if own else 'published'}(path={splits!r}, split={number})", table=table)
            sides = [np.isin(kept, rows) for rows in (split.train, split.test)]
            for side, name, color in zip(sides, ("train", "test"), ("C0", "C1"), strict=True):
                axis.scatter(*points[side].T, s=6, color=color, alpha=0.5, linewidths=0, label=name)
            axis.set(title=f"split {number}, distance {far[number]:.3g}", xticks=[], yticks=[], xlabel=projection)
            drawn[number] = (kept[sides[0]], kept[sides[1]])
        axes[0, 0].legend(frameon=False)
    return projection, drawn
