"""Make splits of growing difficulty from the features of a dataset: `unimetric split`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.evaluate import check_rows
from unimetric.analysis.swapping import ClassShift, Step, even_targets, nearest, plateau_of, removed, scripted_removal, swapped
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
from unimetric.runs.record import describe_images
from unimetric.runs.rows import readable
from unimetric.spec import create


def features_of(
    config: RunConfig, *, path: str | Path | None = None, progress: Progress | None = None
) -> tuple[Table, Float[np.ndarray, "N C"]]:
    """Compute the backbone's global token of every image of a dataset, center-cropped.

    Args:
        config: Settings: dataset, transform, backbone and device. With `on_bad_picture=skip`, images that
            cannot be read are removed from the table.
        path: An `.npz` file of `embeddings` and `labels` of all rows. It is read if it exists, else written, with a hash of
            the images and the spec strings of backbone and transform.
        progress: Callback with (finished images, all images).

    Returns:
        The table, and the features of its rows.
    """
    table: Table = create("datasets", config.dataset)
    rows, skipped = readable(config, table, np.arange(len(table)), progress=progress)
    table = table.take(rows) if skipped else table
    if path is not None and Path(path).exists():
        return table, read_features(path, table, backbone=config.backbone, transform=config.transform)
    fabric = open_fabric(config)
    try:
        backbone = build_model(config).backbone
    except UnimetricError as error:  # the hint may refer to an argument of the default
        raise UnimetricError(f'`--backbone "{config.backbone}"`: {error.message}', error.hint) from None
    model = Model(backbone, Identity(features=backbone.channels))
    features = embed_all(fabric, config, model, table, progress=progress).cpu().numpy()
    if path is not None:
        write_arrays(
            Path(path),
            embeddings=features,
            labels=table.labels,
            images=np.array(_hash_images(table)),
            backbone=np.array(config.backbone),
            transform=np.array(config.transform),
        )
    return table, features


def _hash_images(table: Table) -> str:
    """Return a hash of the relative path, size and class of every image.

    Modification times are not part of it, because a copy of a dataset has others.
    """
    images = describe_images(table, {"all": np.arange(len(table))})["all"]
    return hashlib.sha256(json.dumps([(image.name, image.size, image.label) for image in images]).encode()).hexdigest()


def read_features(path: str | Path, table: Table, **made_by: str) -> Float[np.ndarray, "N C"]:
    """Read features from a file, and check that they are those of a dataset.

    Args:
        path: An `.npz` file of `embeddings` (N, C) and `labels` (N,). If it also has a hash of the images, as in files
            of `features_of`, the images must be the same.
        table: Table of the dataset. The file must have all of its rows.
        made_by: Spec strings of `backbone` and `transform`. They must be those of the file, if it has them.
    """
    hint = "name a new file: `unimetric split DATASET --features FILE.npz --out splits.json` computes the features"
    arrays = read_arrays(Path(path), hint)
    if not {"embeddings", "labels"} <= arrays.keys():
        raise UnimetricError(f"{path}: must contain `embeddings` and `labels`, got {', '.join(arrays) or 'nothing'}", hint)
    features, labels = arrays["embeddings"], arrays["labels"]
    check_rows(path, features)
    if len(features) != len(table) or not np.array_equal(labels, table.labels):
        raise UnimetricError(
            f"{path}: must have the {len(table):,} images of the dataset in their order, got {len(features):,} others",
            f"{hint}; a part of the rows is not enough",
        )
    if "images" in arrays and str(arrays["images"]) != _hash_images(table):
        raise UnimetricError(f"{path}: must have the images of the dataset, got those of another one, or of other sizes", hint)
    for key, text in made_by.items():
        if key in arrays and str(arrays[key]) != text:
            raise UnimetricError(f"{path}: must have the features of {key} `{text}`, got those of `{arrays[key]}`", hint)
    if not np.isfinite(features).all():
        raise UnimetricError(f"{path}: some features are not finite", "compute them again with `precision=32-true`")
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
    """Make a sequence of splits with their distances, and select some of them.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021), section 3.3.

    Args:
        table: Table of the dataset. The sequence starts at its own split.
        features: One row per image.
        swaps: Number of swaps per step: 2 for CUB and Cars196, 1,000 for SOP.
        count: Number of splits by swapping, including the start.
        easier: Number of splits towards an easier one, including the start; 1 makes none. The authors
            make 15, for CUB only.
        removal: Whether classes are removed after the swaps, until half of the images are left.
        code_removal: Whether classes are removed as in the authors' script instead of the paper. The
            script has no least number of images.
        plateau: Whether swapping ends when the distance no longer rises, as in the paper. The script
            always makes `count` splits.
        choose: Number of splits to select, evenly over the range of distances. The dataset's own split
            is always among them.
        targets: Multiples of the distance of the dataset's own split, whose nearest splits are selected
            instead. Those of the paper are `swapping.PAPER_TARGETS`.
        seed: Random seed of the halves of each class, whose distance is that of no shift.
        progress: Callback with (finished splits, all splits). The total is an estimate.

    Returns:
        The content of the file that `unimetric split` writes.
    """
    start = starting_split(table, features)
    easy, hard, less = sequence(
        start, swaps=swaps, count=count, easier=easier, removal=removal, code_removal=code_removal, plateau=plateau, progress=progress
    )
    history = [*easy[::-1], *hard, *less]
    return {
        "format": "unimetric splits 1",
        "pictures": len(table),
        "no_shift": _no_shift(features, start.labels, seed),
        "plateau": hard[plateau_of([step.distance for step in hard])].key,
        "classes": [table.class_names[number] for number in start.classes],
        "splits": chosen(history, choose=choose, targets=targets),
        "history": [
            {"key": step.key, "distance": step.distance, "share": step.share, "train": step.train.tolist(), "test": step.test.tolist()}
            for step in history
        ],
    }


class Start(NamedTuple):
    """Start of a sequence of splits.

    Args:
        classes: Class numbers of the table that have images.
        labels: Class of each row as an index into `classes`.
        shift: Means and sizes of these classes.
        split: The dataset's own split.
    """

    classes: np.ndarray
    labels: np.ndarray
    shift: ClassShift
    split: Step


def check_classes(table: Table) -> None:
    """Raise an error if training and test share a class, or have fewer than three classes.

    Args:
        table: Table of a dataset.
    """
    train, test = set(table.labels[table.train].tolist()), set(table.labels[~table.train].tolist())
    if train & test or min(len(train), len(test)) < 3:
        raise UnimetricError(
            f"{table.full_name}: must have at least three training classes and three other test classes, "
            f"got {len(train)} and {len(test)}, of which {len(train & test)} are the same",
            "add classes, or divide them with `folder(root='...', train=0.5)`",
        )


def starting_split(table: Table, features: Float[np.ndarray, "N C"]) -> Start:
    """Compute the distance of a dataset's own split.

    Args:
        table: Table of the dataset.
        features: One row per image.

    Raises:
        UnimetricError: Training and test share a class, or have fewer than three classes.
    """
    check_classes(table)
    classes = np.unique(table.labels)  # without classes that have no image
    labels = np.searchsorted(classes, table.labels)
    trained = np.zeros(len(classes), bool)
    trained[labels[table.train]] = True
    means = class_means(torch.from_numpy(features), torch.from_numpy(labels), len(classes)).numpy()
    shift = ClassShift(means, np.bincount(labels))
    return Start(classes, labels, shift, shift.measure("0", np.flatnonzero(trained), np.flatnonzero(~trained)))


def sequence(
    start: Start,
    *,
    swaps: int,
    count: int,
    easier: int,
    removal: bool,
    code_removal: bool,
    plateau: bool,
    progress: Progress | None = None,
) -> tuple[list[Step], list[Step], list[Step]]:
    """Make easier splits, harder splits, and splits with removed classes.

    Args:
        start: Start of the sequence.
        swaps: Number of swaps per step.
        count: Number of harder splits, including the start.
        easier: Number of easier splits, including the start.
        removal: Whether classes are removed after the swaps.
        code_removal: Whether they are removed as in the authors' script.
        plateau: Whether swapping ends when the distance no longer rises.
        progress: Callback with (finished splits, all splits).

    Returns:
        The easier splits without the start; the harder ones with it; those with removed classes.
    """
    shift, total = start.shift, count + easier + 35
    easy: list[Step] = []
    hard: list[Step] = [start.split]
    less: list[Step] = []

    def append(splits: list[Step], steps: Iterable[Step]) -> None:
        for step in steps:
            splits.append(step)
            if progress is not None:
                progress(min(len(hard) + len(easy) + len(less), total - 1), total)

    append(hard, swapped(shift, start.split, swaps=swaps, count=count, plateau=plateau))
    append(easy, swapped(shift, start.split, swaps=swaps, count=easier, history=30, reverse=True, plateau=plateau))
    if removal:
        rule = scripted_removal if code_removal else removed
        append(less, rule(shift, hard[-1], classes=swaps))
    if progress is not None:
        progress(total, total)
    return easy, hard, less


def chosen(history: Sequence[Step], *, choose: int, targets: Sequence[float] = ()) -> dict[str, dict[str, Any]]:
    """Select splits of a sequence, the dataset's own split always among them.

    Distances of other features have another scale, so targets are relative. Logs a warning if the sequence
    does not reach some of them, or has fewer different splits than are to be selected.

    Args:
        history: All splits. The key of the dataset's own split is `0`. A split that occurs repeatedly is selected once.
        choose: Number of splits to select, evenly over the range of distances.
        targets: Multiples of the distance of the dataset's own split, whose nearest splits are selected
            instead. 1 is added if it is missing.

    Returns:
        By number from 1 on: `key` and `distance` of the split, and the `target` distance.

    Raises:
        UnimetricError: No target is in the range of the sequence.
    """
    history = _distinct(history)
    distances = [step.distance for step in history]
    default = next(index for index, step in enumerate(history) if step.key == "0")
    if targets:
        wanted = [distances[default] * target for target in sorted({1.0, *map(float, targets)})]
        _check_range(targets, distances, distances[default])
    else:
        if choose > len(history):
            message = "the sequence has only %d different splits, so %d are selected instead of %d"
            logging.getLogger("unimetric").warning(message, len(history), len(history), choose)
        wanted = even_targets(distances, min(choose, len(history)), keep=default)
    found = {}
    for number, (position, target) in enumerate(zip(nearest(distances, wanted, keep=default), wanted, strict=True), 1):
        found[str(number)] = {"key": history[position].key, "distance": distances[position], "target": target}
    return found


def _distinct(history: Sequence[Step]) -> list[Step]:
    """Return the splits without those that have the classes of another one.

    With few classes, swapping returns to earlier splits. The dataset's own split always stays.
    """
    first: dict[tuple[bytes, bytes], Step] = {}
    for step in sorted(history, key=lambda step: step.key != "0"):
        first.setdefault((np.sort(step.train).tobytes(), np.sort(step.test).tobytes()), step)
    kept = {step.key for step in first.values()}
    return [step for step in history if step.key in kept]


def _check_range(targets: Sequence[float], distances: Sequence[float], default: float) -> None:
    """Log a warning if targets are outside the range of distances; raise an error if all are.

    Args:
        targets: Multiples of the distance of the dataset's own split.
        distances: Distances of all splits.
        default: Distance of the dataset's own split.
    """
    outside = [target for target in sorted(set(targets)) if not min(distances) <= target * default <= max(distances)]
    if not outside:
        return
    low, high = min(distances) / default, max(distances) / default
    problem = (
        f"the splits have {low:.3g} to {high:.3g} times the distance of the dataset's own split, but the targets "
        f"{', '.join(f'{target:.3g}' for target in outside)} are outside"
    )
    if len(outside) == len(set(targets)):
        raise UnimetricError(problem, f"targets are multiples of that distance: use numbers from {low:.3g} to {high:.3g}")
    logging.getLogger("unimetric").warning("%s; they get the splits nearest to them", problem)


def _no_shift(features: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """Return the mean distance between the class means of two random halves of every class.

    This is the distance without a shift. Milbich et al. 2021 report such values in table 1 without code.
    """
    rng, found = np.random.default_rng(seed), []
    singles = np.bincount(labels) < 2
    for _ in range(5):
        order = np.lexsort((rng.random(len(labels)), labels))
        first = np.zeros(len(labels), bool)
        first[order[::2]] = True  # every other image of each class
        halves = []
        for half in (first, ~first):
            kept = half & ~singles[labels]
            numbers = np.unique(labels[kept], return_inverse=True)[1]
            halves.append(class_means(torch.from_numpy(features[kept]), torch.from_numpy(numbers), int(numbers.max()) + 1))
        found.append(float(frechet_distance(halves[0], halves[1])))
    return float(np.mean(found))


def write_splits(path: Path, splits: dict[str, Any], notes: dict[str, Any]) -> None:
    """Write the file that `ood(path=...)` reads, and a figure of the sequence.

    Args:
        path: A `.json` file. The figure has the same name and ends in `.png`.
        splits: Result of `make_splits`.
        notes: Origin of the features.
    """
    write_text(path, json.dumps({"format": splits["format"], **notes, **splits}))
    _draw(path.with_suffix(".png"), splits)


def _draw(path: Path, splits: dict[str, Any]) -> None:
    """Plot the distance along the sequence (Milbich et al. 2021, fig. 1)."""
    keys = [step["key"] for step in splits["history"]]
    distances = [step["distance"] for step in splits["history"]]
    colors = {"easier": "#4c9f70", "swapped": "#3b6ea8", "removed": "#b5523b"}
    groups = [_phase(key) for key in keys]
    with Canvas(path, width=7, height=4) as axes:
        for name, color in colors.items():
            steps = [step for step, group in enumerate(groups) if group == name]
            if steps:
                axes.plot(steps, [distances[step] for step in steps], "o-", markersize=3, color=color, label=name)
        for number, split in splits["splits"].items():
            step = keys.index(split["key"])
            axes.annotate(number, (step, distances[step]), textcoords="offset points", xytext=(0, 7), ha="center", weight="bold")
        axes.axhline(splits["no_shift"], linestyle=":", color="grey", label="no shift: random halves of each class")
        axes.axvline(keys.index("0"), linewidth=0.8, color="grey")
        axes.margins(y=0.12)
        axes.set(xlabel="step (the line marks the dataset's own split)", ylabel="Frechet distance, train to test")
        axes.legend(frameon=False)


def _phase(key: str) -> str:
    """Return how a split was made."""
    if key.startswith("-"):
        return "easier"
    return "removed" if key.startswith("R") else "swapped"
