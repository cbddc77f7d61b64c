"""Figure of the number of training images per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.config import load
from unimetric.runs.rows import read_table


def imbalance(run: str | Path, out: str | Path) -> dict[str, np.ndarray]:
    """Draw the training images per class, sorted by size, with one color per dataset.

    Reference:
        Fig. 5 of PUMA (Kim et al. 2023).

    Args:
        run: Run folder or TOML file with the dataset and split.
        out: PNG file.

    Returns:
        Class sizes of each dataset, largest first.
    """
    config = load(Path(run) / "config.toml" if Path(run).is_dir() else run)
    table, split = read_table(config)
    source, labels = table.source[split.train], table.labels[split.train]
    classes, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    of = source[first]
    with Canvas(out, width=8, height=3.5) as axes:
        for number, name in enumerate(table.source_names):
            ranks = np.flatnonzero(of[order] == number)
            if len(ranks):
                label = f"{name}: {sizes[of == number].sum():,} images, {(of == number).sum():,} classes"
                axes.vlines(ranks, 0, sizes[order][ranks], color=f"C{number}", linewidth=max(0.3, 400 / len(classes)), label=label)
        axes.set_xlabel("class, by size")
        axes.set_ylabel("training images")
        axes.legend(fontsize=7)
    return {name: np.sort(sizes[of == number])[::-1] for number, name in enumerate(table.source_names)}
