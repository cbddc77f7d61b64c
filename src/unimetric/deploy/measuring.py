"""Evaluate and calibrate an index with the labels of its images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from unimetric.analysis.evaluate import check_metrics, numbers_of
from unimetric.datasets.files import LABEL
from unimetric.deploy.facts import THRESHOLDS, Facts
from unimetric.deploy.index import Index
from unimetric.deploy.sharded_gallery import ShardedSpace
from unimetric.deploy.sharding import Cluster
from unimetric.errors import UnimetricError, closest
from unimetric.files import write_json
from unimetric.geometry.pair_scores import PairScores
from unimetric.geometry.space import Space
from unimetric.images.loading import Progress
from unimetric.runs.folder import lock_folder

#: Images whose pairs a calibration compares. More make it slower, and no more certain: its unit is the class.
_MOST = 20_000
#: Queries of one search in the store.
_QUERIES = 512


class StoredSpace(Space):
    """Space whose neighbors are those that a store finds.

    Args:
        index: Index.
        ids: Id of each image.
        progress: Callback with (finished queries, all queries).
        arguments: Arguments of `Space`.
    """

    def __init__(self, index: Index, ids: Sequence[str], *arguments: Any, progress: Progress | None = None, **options: Any) -> None:
        self.index, self.ids, self.progress = index, list(ids), progress
        super().__init__(*arguments, **options)

    def _search(self, k: int) -> Iterator[tuple[int, Int[Tensor, "R K"]]]:
        """Yield the gallery columns that the store finds for some queries at a time."""
        column = {self.ids[row]: number for number, row in enumerate(self.gallery.tolist())}
        placement = self.index.facts.placement
        for start in range(0, self.queries, _QUERIES):
            rows = self.query[start : start + _QUERIES]
            found, _ = self.index.store.search(placement.queries(self.points[rows]), k + 1)
            near = torch.full((len(rows), k), -1, dtype=torch.int64)
            for number, row in enumerate(rows.tolist()):
                others = [column.get(each, -1) for each in found[number] if each and each != self.ids[row]][:k]
                near[number, : len(others)] = torch.tensor(others, dtype=torch.int64)
            yield start, near
            if self.progress is not None:
                self.progress(start + len(rows), self.queries)


def _labeled(index: Index, most: int | None = None) -> tuple[list[str], np.ndarray, np.ndarray, list[str]]:
    """Return ids, stored vectors, class numbers and class names of an index.

    An image without a class has the number -1.

    Args:
        index: Index with a column `label`.
        most: Number of images, of whole classes in random order. Defaults to all.
    """
    if LABEL not in index.columns:
        hint = closest(LABEL, index.columns) or "build it with `--labels` or a csv file"
        raise UnimetricError(f"{index.path}: has no column `{LABEL}`", hint)
    ids: list[str] = []
    labels: list[Any] = []
    for some, _, columns in index.store.scan():
        ids += some
        labels += columns[LABEL]
    known = sorted({label for label in labels if label is not None})
    number = {label: row for row, label in enumerate(known)} | {None: -1}
    codes = np.array([number[label] for label in labels], np.int64)
    if most is not None:
        order = np.random.default_rng(0).permutation(len(known))
        sizes = np.bincount(codes[codes >= 0], minlength=len(known))[order]
        chosen = order[: max(2, int(np.searchsorted(sizes.cumsum(), most, "right")))]
        rows = np.flatnonzero(np.isin(codes, chosen))
        ids, codes = [ids[row] for row in rows], codes[rows]
    vectors = [index.store.vectors(ids[start : start + 4096]) for start in range(0, len(ids), 4096)]
    return ids, np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32), codes, known


def evaluate_index(
    index: Index, *, metrics: Sequence[str] = (), level: float = 0.0, progress: Progress | None = None, cluster: Cluster | None = None
) -> dict[str, dict[str, float]]:
    """Evaluate the images of an index with their labels.

    Neighbors are those of an exact search, and those that the store finds. All vectors are read into memory.

    Args:
        index: Index with a column `label`. Images without a label are in the gallery and match nothing.
        metrics: Metric spec strings. Defaults to recall@1.
        level: Level of confidence intervals, such as 0.95; 0 for none.
        progress: Callback with (finished queries, all queries).
        cluster: Cluster whose workers search exactly, each in a shard of the gallery. Defaults to this process.

    Returns:
        `exact` and `store`: metric values by spec string.
    """
    check_metrics(metrics, level)
    ids, vectors, labels, names = _labeled(index)
    if len(ids) < 2 or not names:
        raise UnimetricError(f"{index.path}: an evaluation needs at least 2 images with a label, got {len(ids)}", "add images")
    placement = index.facts.placement
    points = torch.from_numpy(placement.points(vectors))
    options: dict[str, Any] = {"geometry": placement.geometry, "curvature": placement.curvature, "distractors": [-1], "names": ids}
    texts = list(metrics) or ["recall(k=1)"]
    codes = torch.from_numpy(labels)
    stored = StoredSpace(index, ids, points, codes, progress=progress, **options)
    space = Space(points, codes, **options) if cluster is None else ShardedSpace(cluster, points, codes, **options)
    return {
        "exact": numbers_of(space, texts, level=level),
        "store": numbers_of(stored, texts, level=level),
    }


def calibrate_index(index: Index, *, fpr: float = 0.01, level: float = 0.95, draws: int = 1000) -> dict[str, Any]:
    """Choose the score above which two images are of one class.

    It is written to `thresholds.json`.

    The threshold is the lowest score that at most a fraction `fpr` of the pairs of two classes exceeds. It is chosen on
    the images of the index. If the model was trained on them, new classes have more false matches; calibrate the run.

    Args:
        index: Index with a column `label`.
        fpr: False positive rate: fraction of the pairs of two classes that may be accepted.
        level: Level of the intervals over whole classes.
        draws: Number of bootstrap draws.

    Returns:
        The content of the file. Intervals of too few classes are None; see `PairScores.interval`.
    """
    if not 0 < fpr < 1 or not 0 < level < 1:
        raise UnimetricError(f"`--fpr` and `--level` must be above 0 and below 1, got {fpr} and {level}", "use `--fpr 0.01 --level 0.95`")
    ids, vectors, labels, names = _labeled(index, _MOST)
    if len(set(labels.tolist())) < 2:
        raise UnimetricError(f"{index.path}: a threshold needs at least 2 classes, got {len(names)}", "add labeled images")
    placement = index.facts.placement
    points = torch.from_numpy(placement.points(vectors))
    space = Space(points, torch.from_numpy(labels), geometry=placement.geometry, curvature=placement.curvature, names=ids)
    pairs = PairScores(space)
    threshold = pairs.threshold(fpr)
    if not math.isfinite(threshold):
        raise UnimetricError(f"`--fpr` must reject a pair of two classes, got {fpr}", "use a smaller rate")
    rates, drawn = pairs.rates(threshold), pairs.resample(fmr=fpr, draws=draws)
    result = {
        "fpr": fpr,
        "level": level,
        "score": space.geometry,
        "threshold": threshold,
        "threshold_interval": pairs.interval(drawn.threshold, level),
        "images": space.size,
        "classes": space.classes,
        "fnr": rates.fnmr,
        "fnr_interval": pairs.interval(pairs.resample(threshold=threshold, draws=draws).fnmr, level),
    }
    with lock_folder(index.path, "writing to"):
        write_json(index.path / THRESHOLDS, result)
        facts = Facts.read(index.path)
        replace(facts, generation=facts.generation + 1).write(index.path)
    index.refresh()
    return result
