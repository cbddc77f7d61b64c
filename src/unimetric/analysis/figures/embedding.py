"""Figure of the embedding space of a run, as a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError
from unimetric.geometry import unit
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all
from unimetric.runs.folder import open_run
from unimetric.runs.rows import read_table, readable


def embedding_map(run: str | Path, out: str | Path, *, points: int = 250, **overrides: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draw t-SNE maps of training and test embeddings, with one color per dataset.

    Reference:
        Fig. 10 of PUMA (Kim et al. 2023).

    Args:
        run: Run folder.
        out: PNG file.
        points: Largest number of images per dataset and part, evenly spaced.
        overrides: Settings that may differ from training, such as `device`.

    Returns:
        By part: points (N, 2), and the dataset number of each.
    """
    from sklearn.manifold import TSNE  # loads slowly

    config, model = open_run(run, overrides)
    table, split = read_table(config)
    fabric = open_fabric(config)
    found = {}
    for part, rows in (("train", np.unique(split.train)), ("test", split.test)):  # a sampled split may repeat training images
        rows = np.concatenate([_spread(rows[table.source[rows] == number], points) for number in range(len(table.source_names))])
        rows, _ = readable(config, table, rows)
        if len(rows) < 4:
            raise UnimetricError(f"{run}: a map requires at least 4 images of `{part}`, got {len(rows)}", "use a run with more images")
        embeddings = unit(embed_all(fabric, config, model, table.take(rows))).cpu().numpy()
        perplexity = min(30.0, (len(rows) - 1) / 3)
        places = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(embeddings)
        found[part] = (places, table.source[rows])
    with Canvas(out, width=9, height=4.5, rows=1, columns=2) as axes:
        for axis, (part, (places, source)) in zip(axes[0], found.items(), strict=True):
            for number, name in enumerate(table.source_names):
                axis.scatter(*places[source == number].T, s=6, linewidths=0, color=f"C{number}", label=name)
            axis.set(title=f"{part} images, t-SNE", xticks=[], yticks=[])
        axes[0, 1].legend(frameon=False, fontsize="x-small", markerscale=2)
    return found


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many rows, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)]
