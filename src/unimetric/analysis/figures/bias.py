"""Figure of the shift of splits, measured by several networks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from unimetric.analysis.canvas import Canvas
from unimetric.analysis.split import read_features
from unimetric.analysis.swapping import ClassShift
from unimetric.errors import UnimetricError
from unimetric.geometry.frechet import class_means
from unimetric.images.table import Table
from unimetric.spec import create
from unimetric.splits.ood import distances


def network_bias(targets: Sequence[str | Path], out: str | Path, *, splits: str = "", dataset: str = "") -> dict[str, dict[str, float]]:
    """Draw the Frechet distances along sequences of splits, measured by several networks.

    The distances of each network are scaled to the range from 0 to 1. A file of splits has the sequence that
    its own network made, as in the paper. An `.npz` file of features measures the sequence of another file,
    so that all networks measure the same splits.

    Reference:
        Figure 1 of the supplement of Characterizing generalization under out-of-distribution shifts in deep metric learning (Milbich et
        al., NeurIPS 2021).

    Args:
        targets: Files of splits, and `.npz` files of `unimetric split --features`.
        out: PNG file.
        splits: File of splits that `.npz` files measure.
        dataset: Dataset spec string of the `.npz` files.

    Returns:
        By file: the distance of each split, by its key. Only keys that all files have.
    """
    features = [Path(target) for target in targets if str(target).endswith(".npz")]
    if features and not (splits and dataset):
        raise UnimetricError("features require splits and a dataset", "use `--splits FILE` and `--dataset`")
    found = {str(target): _own_distances(str(target)) for target in targets if not str(target).endswith(".npz")}
    table: Table | None = create("datasets", dataset) if features else None
    for path in features:
        assert table is not None, "features have a dataset"
        found[str(path)] = measure_splits(path, table, splits)
    if not found:
        raise UnimetricError("the figure requires files of splits or features", "name files of `unimetric split`")
    first = next(iter(found.values()))
    keys = [key for key in first if all(key in each for each in found.values())]
    if len(keys) < 2:
        raise UnimetricError(f"the files must share at least 2 splits, got {len(keys)}", "make them with the same `--swaps` and `--count`")
    found = {name: {key: each[key] for key in keys} for name, each in found.items()}
    with Canvas(out, width=7, height=4) as axes:
        for name, each in found.items():
            values = np.array(list(each.values()))
            axes.plot(range(len(keys)), (values - values.min()) / max(np.ptp(values), 1e-300), "o-", markersize=3, label=Path(name).stem)
        axes.set_xticks(range(len(keys)), keys, rotation=60, fontsize=7)
        axes.set(xlabel="split", ylabel="Frechet distance, scaled")
        axes.legend(frameon=False, fontsize="small")
    return found


def _own_distances(path: str) -> dict[str, float]:
    """Return the distance of each step of a file's own sequence."""
    return {key.removeprefix("key "): distance for key, distance in distances(path).items() if key.startswith("key ")}


def measure_splits(path: Path, table: Table, splits: str) -> dict[str, float]:
    """Compute the Frechet distance of every step of a sequence of splits.

    Args:
        path: An `.npz` file of features of the whole dataset.
        table: Table of the dataset.
        splits: File of splits.
    """
    features = torch.from_numpy(read_features(path, table)).double()
    # Labels of a part of a dataset have gaps.
    _, numbers, sizes = np.unique(table.labels, return_inverse=True, return_counts=True)
    shift = ClassShift(class_means(features, torch.from_numpy(numbers), len(sizes)).numpy(), sizes)
    found = {}
    for key in _own_distances(splits):
        split = create("splits", f"ood(path={splits!r}, key={key!r})", table=table)
        found[key] = shift.measure(key, np.unique(numbers[split.train]), np.unique(numbers[split.test])).distance
    return found
