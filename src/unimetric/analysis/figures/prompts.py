"""Which prompts each dataset prefers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError
from unimetric.images.loading import View, open_pictures
from unimetric.runs.device import open_fabric
from unimetric.runs.folder import open_run
from unimetric.runs.rows import read_table, readable
from unimetric.spec import create


def prompt_preference(run: str | Path, out: str | Path, *, pictures: int = 500) -> Float[np.ndarray, "S M"]:
    """How much of each prompt the pictures of a dataset take on average (PUMA, Kim et al. 2023, fig. 4).

    Args:
        run: a run folder with a prompt pool.
        out: the PNG file.
        pictures: at most so many test pictures of a dataset, evenly spaced.

    Returns:
        (S, M), a row a dataset, a column a prompt.
    """
    config, model = open_run(run)
    prompt: Any = getattr(model.backbone, "prompt", None)
    if not hasattr(prompt, "preference"):
        raise UnimetricError(f"{run}: its adapter `{config.adapter}` has no pool of prompts", "name a run with `puma` or `prompt_pool`")
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
        options: dict[str, Any] = {"mean": model.mean, "std": model.std, "residence": config.residence, "workers": config.workers}
        opened = open_pictures(table.take(rows), device=fabric.device, **options)
        look, batch = View(create("transforms", config.transform)), config.evaluate_batch
        chunks = [np.arange(start, min(start + batch, len(rows))) for start in range(0, len(rows), batch)]
        total = torch.zeros(len(prompt.keys), device=fabric.device)
        with torch.inference_mode(), fabric.autocast():
            for images in opened.load((chunk, look) for chunk in chunks):
                total += prompt.preference(model.backbone.patches(images)).sum(0)
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
