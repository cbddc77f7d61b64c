"""How many training images each class has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.config import load
from unimetric.runs.rows import read_table


def imbalance(run: str | Path, out: str | Path) -> dict[str, np.ndarray]:
    """How many training pictures each class has, classes in order of size, a colour a dataset (PUMA, Kim et al. 2023, fig. 5).

    Args:
        run: a run folder or a TOML file, whose dataset and split count.
        out: the PNG file.

    Returns:
        for each dataset, its classes' sizes, largest first.
    """
    config = load(Path(run) / "config.toml" if Path(run).is_dir() else run)
    table, split = read_table(config)
    source, labels = table.source[split.train], table.labels[split.train]
    classes, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    of = source[first]
    with Canvas(out, width=8, height=3.5) as axes:
        for number, name in enumerate(table.source_names):
            places = np.flatnonzero(of[order] == number)
            if len(places):
                label = f"{name}: {sizes[of == number].sum():,} pictures, {(of == number).sum():,} classes"
                axes.vlines(places, 0, sizes[order][places], color=f"C{number}", linewidth=max(0.3, 400 / len(classes)), label=label)
        axes.set_xlabel("class, by size")
        axes.set_ylabel("training pictures")
        axes.legend(fontsize=7)
    return {name: np.sort(sizes[of == number])[::-1] for number, name in enumerate(table.source_names)}
