"""Figures of universal metric learning: which prompts a dataset prefers, how unequal datasets are, how often an adapter should count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from unimetric.config import load
from unimetric.engine.canvas import Canvas
from unimetric.engine.evaluate import open_fabric, open_run, read_table, readable
from unimetric.engine.log import read_done
from unimetric.engine.pictures import Look, open_pictures
from unimetric.errors import UnimetricError
from unimetric.spec import bind, create, signature


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
        look, batch = Look(create("transforms", config.transform)), config.evaluate_batch
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


def keep_probability(runs: Sequence[str | Path], out: str | Path, *, metrics: Sequence[str] = ()) -> dict[float, dict[str, float]]:
    """Recall against the probability that an adapter counts in training (PUMA, Kim et al. 2023, fig. 7).

    Args:
        runs: finished run folders that differ in their adapter's `keep`.
        out: the PNG file.
        metrics: which numbers of the best epoch; default all that all runs have.

    Returns:
        for each probability, its numbers.
    """
    found: dict[float, dict[str, float]] = {}
    for run in runs:
        config = load(Path(run) / "config.toml")
        if not config.adapter or not (Path(run) / "done").is_file():
            raise UnimetricError(f"{run}: no finished run with an adapter", "name runs of `stochastic_adapter`, `puma` or `lora`")
        part, arguments = bind("adapters", config.adapter)
        parameters = signature(part).parameters
        if "keep" not in parameters:
            raise UnimetricError(f"{run}: `{config.adapter}` has no `keep`", "name runs of `stochastic_adapter`, `puma` or `lora`")
        line = read_done(Path(run))
        numbers = {key.removeprefix("test/"): value for key, value in line.items() if key.startswith("test/")}
        keep = arguments.get("keep", parameters["keep"].default)
        if keep in found:
            raise UnimetricError(f"{run}: a run before it has `keep={keep}`, too", "name one run for each probability")
        found[keep] = numbers
    found = dict(sorted(found.items()))
    shown = list(metrics) or [key for key in next(iter(found.values()), {}) if all(key in each for each in found.values())]
    with Canvas(out, width=5, height=3.5) as axes:
        for key in shown:
            axes.plot(list(found), [each[key] for each in found.values()], marker="o", label=key)
        axes.set_xlabel("keep probability")
        axes.set_ylabel("score")
        axes.legend(fontsize=7)
    return found
