"""Figure of the prompts that each dataset prefers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError
from unimetric.images.loading import View
from unimetric.runs.device import evaluation_batch, open_fabric
from unimetric.runs.embed import open_images
from unimetric.runs.folder import open_run
from unimetric.runs.rows import read_table, readable
from unimetric.spec import create


def prompt_preference(run: str | Path, out: str | Path, *, pictures: int = 500) -> Float[np.ndarray, "S M"]:
    """Draw the mean weight of each prompt on the test images of each dataset.

    Reference:
        Fig. 4 of PUMA (Kim et al. 2023).

    Args:
        run: Run folder with a prompt pool.
        out: PNG file.
        pictures: Largest number of test images per dataset, evenly spaced.

    Returns:
        Mean weights (S, M), with one row per dataset and one column per prompt.
    """
    config, model = open_run(run)
    if not model.backbone.pool_size:
        adapter = config.adapter or "none"
        raise UnimetricError(f"{run}: the adapter `{adapter}` has no prompt pool", "name a run with `puma` or `prompt_pool`")
    table, split = read_table(config)
    test, _ = readable(config, table, split.test)
    fabric = open_fabric(config)
    model.to(fabric.device).eval()
    means, names = [], []
    for number, name in enumerate(table.source_names):
        rows = test[table.source[test] == number]
        if not len(rows):
            continue
        rows = rows[np.linspace(0, len(rows) - 1, min(pictures, len(rows))).astype(np.int64)]
        opened = open_images(fabric, config, model, table.take(rows))
        view, batch = View(create("transforms", config.transform)), evaluation_batch(config, fabric)
        chunks = [np.arange(start, min(start + batch, len(rows))) for start in range(0, len(rows), batch)]
        total = torch.zeros(model.backbone.pool_size, device=fabric.device)
        with torch.inference_mode():
            for images in opened.load((chunk, view) for chunk in chunks):
                with fabric.autocast():  # crops keep their precision
                    total += model.backbone.preference(images).sum(0)
        means.append((total / len(rows)).cpu().numpy())
        names.append(name)
    found = np.stack(means)
    with Canvas(out, width=8, height=1 + 0.4 * len(found)) as axes:
        shown = axes.imshow(found, aspect="auto", cmap="viridis")
        axes.set_yticks(range(len(names)), names)
        axes.set_xticks(range(found.shape[1]))
        axes.set_xlabel("prompt")
        axes.figure.colorbar(shown, label="mean similarity to the key")
    return found
