"""From features of a whole dataset to splits of growing difficulty: `unimetric split`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.evaluate import check_rows
from unimetric.analysis.swapping import ClassShift, Step, evenly, nearest, plateau_of, removed, swapped
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import read_arrays, write_arrays, write_text
from unimetric.geometry.frechet import class_means, frechet_distance
from unimetric.heads.identity import Identity
from unimetric.images.loading import Progress
from unimetric.images.table import Table
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all
from unimetric.runs.model import Model, build_model
from unimetric.runs.rows import readable
from unimetric.spec import create


def features_of(
    config: RunConfig, *, path: str | Path | None = None, progress: Progress | None = None
) -> tuple[Table, Float[np.ndarray, "N C"]]:
    """The dataset, and the backbone's summary of every one of its pictures, each seen at its centre.

    With `on_bad_picture=skip`, the dataset is given without the pictures that cannot be read.

    Args:
        config: its dataset, transform and backbone; the device; and what happens to a picture that cannot be read.
        path: an `.npz` file of `embeddings` and `labels` of all rows: read if it is there, written if it is not.
        progress: called with (done, all).
    """
    table: Table = create("datasets", config.dataset)
    rows, skipped = readable(config, table, np.arange(len(table)), progress=progress)
    table = table.take(rows) if skipped else table
    if path is not None and Path(path).exists():
        return table, read_features(path, table)
    fabric = open_fabric(config)
    backbone = build_model(config).backbone
    model = Model(backbone, Identity(features=backbone.channels))
    features = embed_all(fabric, config, model, table, progress=progress).cpu().numpy()
    if path is not None:
        write_arrays(Path(path), embeddings=features, labels=table.labels)
    return table, features


def read_features(path: str | Path, table: Table) -> Float[np.ndarray, "N C"]:
    """Features that were kept, after a check that they are those of this dataset.

    Args:
        path: an `.npz` file of `embeddings` (N, C) and `labels` (N,).
        table: the dataset, all of whose rows are meant.
    """
    hint = "name a new file, and it will be made"
    arrays = read_arrays(Path(path), hint)
    if not {"embeddings", "labels"} <= arrays.keys():
        raise UnimetricError(f"{path}: not an .npz file of `embeddings` and `labels`: it holds {', '.join(arrays) or 'nothing'}", hint)
    features, labels = arrays["embeddings"], arrays["labels"]
    check_rows(path, features)
    if len(features) != len(table) or not np.array_equal(labels, table.labels):
        raise UnimetricError(
            f"{path}: features of {len(features):,} pictures that are not, in this order, the {len(table):,} of the dataset",
            "name a new file, and it will be made; all rows are needed, not a part of them",
        )
    if not np.isfinite(features).all():
        raise UnimetricError(f"{path}: some features are not finite", "make them again, with `precision=32-true`")
    return features.astype(features.dtype.newbyteorder("="), copy=False)


def make_splits(
    table: Table,
    features: Float[np.ndarray, "N C"],
    *,
    swaps: int = 2,
    count: int = 25,
    easier: int = 15,
    removal: bool = True,
    code_removal: bool = False,
    plateau: bool = False,
    choose: int = 9,
    targets: Sequence[float] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The whole sequence of splits with their distances, and the few chosen from it: what `unimetric split` writes (Milbich et al. 2021).

    Args:
        table: the dataset; its own division is where the sequence starts.
        features: one row a picture.
        swaps: exchanges a step; 2 for CUB and Cars196, 1,000 for SOP.
        count: splits by exchanging, the start among them.
        easier: splits of the sequence towards an easier one, the start among them; 1 makes none (the authors make 15 for CUB only).
        removal: go on by removing classes, until half of the pictures are left.
        code_removal: remove as the authors' script does, not as the paper says.
        plateau: end exchanging when the distance no longer rises, as the paper says; the script goes on to `count`.
        choose: how many splits to choose, evenly over the range of distances.
        targets: distances to choose the nearest splits to, instead.
        seed: of the random halves whose distance stands for no shift at all.
        progress: called with (done, all); all is a guess while classes are removed.
    """
    used = np.unique(table.labels)  # classes that a dataset lists and has no picture of play no part
    labels = np.searchsorted(used, table.labels)
    pictures = np.bincount(labels)
    trained = np.zeros(len(used), bool)
    trained[labels[table.train]] = True
    both = np.intersect1d(labels[table.train], labels[~table.train])
    if len(both) or min(trained.sum(), (~trained).sum()) < 3:
        raise UnimetricError("the dataset is not divided into training classes and test classes, three at least of each", "see `standard`")
    means = class_means(torch.from_numpy(features), torch.from_numpy(labels), len(used)).numpy()
    shift = ClassShift(means, pictures)
    start = shift.measure("0", np.flatnonzero(trained), np.flatnonzero(~trained))
    total = count + easier + 35
    hard: list[Step] = [start]
    easy: list[Step] = []
    less: list[Step] = []

    def append_with_progress(steps: Any, kept: list[Step]) -> None:
        for step in steps:
            kept.append(step)
            if progress is not None:
                progress(min(len(hard) + len(easy) + len(less), total - 1), total)

    append_with_progress(swapped(shift, start, swaps=swaps, count=count, plateau=plateau), hard)
    append_with_progress(swapped(shift, start, swaps=swaps, count=easier, history=30, reverse=True, plateau=plateau), easy)
    if removal:
        append_with_progress(removed(shift, hard[-1], classes=swaps, code_removal=code_removal), less)
    if progress is not None:
        progress(total, total)
    history = [*easy[::-1], *hard, *less]
    distances = [step.distance for step in history]
    wanted = sorted(targets) if targets else list(np.linspace(min(distances), max(distances), choose))
    chosen = nearest(distances, wanted) if targets else evenly(distances, choose)
    return {
        "format": "unimetric splits 1",
        "pictures": len(table),
        "no_shift": _no_shift(features, labels, seed),
        "plateau": hard[plateau_of([step.distance for step in hard])].key,
        "classes": [table.class_names[number] for number in used],
        "splits": {
            str(number): {"key": history[place].key, "distance": distances[place], "target": float(target)}
            for number, (place, target) in enumerate(zip(chosen, wanted, strict=True), 1)
        },
        "history": [
            {"key": step.key, "distance": step.distance, "share": step.share, "train": step.train.tolist(), "test": step.test.tolist()}
            for step in history
        ],
    }


def _no_shift(features: np.ndarray, labels: np.ndarray, seed: int, repeats: int = 5) -> float:
    """Mean distance between the class means of two random halves of every class: what remains where there is no shift.

    Milbich et al. 2021 print such values in table 1 and no code for them; this reading is ours.
    """
    rng, found = np.random.default_rng(seed), []
    singles = np.bincount(labels) < 2
    for _ in range(repeats):
        order = np.lexsort((rng.random(len(labels)), labels))
        first = np.zeros(len(labels), bool)
        first[order[::2]] = True  # every other picture of each class
        halves = []
        for half in (first, ~first):
            kept = half & ~singles[labels]
            numbers = np.unique(labels[kept], return_inverse=True)[1]
            halves.append(class_means(torch.from_numpy(features[kept]), torch.from_numpy(numbers), int(numbers.max()) + 1))
        found.append(float(frechet_distance(halves[0], halves[1])))
    return float(np.mean(found))


def write_splits(path: Path, splits: dict[str, Any], notes: dict[str, Any]) -> None:
    """The file that `ood(path=...)` reads, and beside it a picture of the progression.

    Args:
        path: a `.json` file; the picture has the same name and ends in `.png`.
        splits: what `make_splits` gives.
        notes: how the features were made.
    """
    write_text(path, json.dumps({"format": splits["format"], **notes, **splits}))
    _draw(path.with_suffix(".png"), splits)


def _draw(path: Path, splits: dict[str, Any]) -> None:
    """Distance along the sequence (Milbich et al. 2021, fig. 1)."""
    keys = [step["key"] for step in splits["history"]]
    distances = [step["distance"] for step in splits["history"]]
    phases = {"made easier": "#4c9f70", "exchanged": "#3b6ea8", "removed": "#b5523b"}
    groups = ["made easier" if key.startswith("-") else "removed" if key.startswith("R") else "exchanged" for key in keys]
    with Canvas(path, width=7, height=4) as axes:
        for name, colour in phases.items():
            places = [place for place, group in enumerate(groups) if group == name]
            if places:
                axes.plot(places, [distances[place] for place in places], "o-", markersize=3, color=colour, label=name)
        for number, chosen in splits["splits"].items():
            place = keys.index(chosen["key"])
            axes.annotate(number, (place, distances[place]), textcoords="offset points", xytext=(0, 7), ha="center", weight="bold")
        axes.axhline(splits["no_shift"], linestyle=":", color="grey", label="no shift: random halves of each class")
        axes.axvline(keys.index("0"), linewidth=0.8, color="grey")
        axes.margins(y=0.12)
        axes.set(xlabel="step (the line is the dataset's own division)", ylabel="Frechet distance, train to test")
        axes.legend(frameon=False)
