"""Frechet distance compared with scipy.linalg.sqrtm, and time of a sequence of splits.

    python benchmarks/shift.py                     # 2,048 dimensions, as in ResNet-50
    python benchmarks/shift.py --dim 512
    python benchmarks/shift.py --dataset cars196 --features cars.npz --published cars196_splits.json

The time of Unimetric is the median of several runs, that of the formula one run. Both use float64 on one thread and include the
covariances. Times are processor times, which other programs disturb less. The sequence uses synthetic features of the size of CUB200:
200 classes in two halves, with all swaps, removals and distances.

With the features of a dataset (`unimetric split --features`), the sequence is that of the dataset, and published splits are compared with
the splits of the nearest distance.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import scipy.linalg
import torch

from unimetric.analysis.split import make_splits, read_features
from unimetric.geometry.frechet import class_means, frechet_distance
from unimetric.images.table import Table
from unimetric.spec import bind, create
from unimetric.splits.ood import distances


def formula(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the distance by the formula of the ooDML code."""
    own, other = (np.cov(points, rowvar=False) for points in (a, b))
    small = 1e-8 * np.eye(len(own))
    root = scipy.linalg.sqrtm((own + small) @ (other + small)).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(own) + np.trace(other) - 2 * np.trace(root))


def seconds(function: Callable[[], object], repeats: int) -> tuple[float, object]:
    times, value = [], None
    for _ in range(repeats):
        begun = time.process_time()
        value = function()
        times.append(time.process_time() - begun)
    return statistics.median(times), value


def compare_published(dataset: str, features_file: str, published_file: str) -> None:
    """Compare published splits of a dataset with the splits of `unimetric split`.

    Each line has the published distance, the distance of the same classes with these features, the split of the nearest distance, and the
    fraction of classes on the same side.
    """
    table: Table = create("datasets", dataset)
    features = read_features(features_file, table)
    took, splits = seconds(lambda: make_splits(table, features), 1)
    steps = splits["history"]
    found = np.array([step["distance"] for step in steps])
    print(f"{dataset}: {len(steps)} splits in {took:.1f}s, distances {found.min():.2f} to {found.max():.2f}; "
          f"the standard split {found[[step['key'] for step in steps].index('0')]:.2f}, no shift {splits['no_shift']:.2f}")  # fmt: skip
    if not published_file:
        return
    means = class_means(torch.from_numpy(features), torch.from_numpy(table.labels), len(table.class_names))
    print(f"{'split':>6} {'printed':>8} {'measured':>9} {'split':>6} {'distance':>9} {'classes on the same side':>25}")
    for number, printed in distances(published_file).items():
        part, arguments = bind("splits", f"published(path={published_file!r}, split={number}, on_missing='skip')", seed=0)
        split = part(table, **arguments)
        train, test = (np.unique(table.labels[rows]) for rows in (split.train, split.test))
        measured = float(frechet_distance(means[train], means[test]))
        step = steps[int(np.abs(found - measured).argmin())]
        sides = [{splits["classes"][place] for place in step[side]} for side in ("train", "test")]
        theirs = [{table.class_names[label] for label in side} for side in (train, test)]
        # The start of the sequence defines the training side, and swaps keep it.
        same = sum(len(a & b) for a, b in zip(sides, theirs, strict=True)) / sum(map(len, theirs))
        print(f"{number:>6} {printed:>8.2f} {measured:>9.2f} {step['key']:>6} {step['distance']:>9.2f} {same:>25.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--dataset", default="")
    parser.add_argument("--features", default="")
    parser.add_argument("--published", default="")
    options = parser.parse_args()
    if options.features:
        compare_published(options.dataset, options.features, options.published)
        return
    dim, rng = options.dim, np.random.default_rng(0)
    spread = np.geomspace(1, 0.1, dim)
    print(f"{'points':>8} {'dim':>6} {'unimetric':>10} {'sqrtm':>10} {'ratio':>9}   relative difference (sqrtm adds 1e-8 to the diagonals)")
    for points, repeats in ((100, 9), (dim * 5 // 4, 3)):
        a, b = (rng.standard_normal((points, dim)) * spread + 0.1 * rng.standard_normal(dim) for _ in range(2))
        ours, found = seconds(lambda a=a, b=b: float(frechet_distance(torch.from_numpy(a), torch.from_numpy(b))), repeats)
        theirs, expected = seconds(lambda a=a, b=b: formula(a, b), 1)
        print(f"{points:>8} {dim:>6} {ours:>9.4f}s {theirs:>9.2f}s {theirs / ours:>8.1f}x   {abs(found / expected - 1):.1e}")
    labels = np.repeat(np.arange(200), 20)
    features = rng.standard_normal((200, dim))[labels] + rng.standard_normal((4000, dim))
    table = Table(tuple(map(str, range(4000))), labels, tuple(map(str, range(200))), labels < 100)
    took, splits = seconds(lambda: make_splits(table, features), 1)
    print(f"a sequence of {len(splits['history'])} splits of 200 classes in {dim} dimensions: {took:.1f}s")


if __name__ == "__main__":
    main()
