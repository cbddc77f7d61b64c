"""Whether the distance of `unimetric watch` predicts recall: published splits of growing shift, and other datasets.

    python benchmarks/watch.py cars.index splits.json --foreign flowers.index cub.index products.index --out watch.json --figure watch.png

For each split, the gallery is its training classes and the queries are its test classes. For another dataset, the gallery is the whole
first index. Recall@1 is that of the queries among each other, which needs labels; `watch` sees the distance only. Recall is predicted in
two ways: by the curve of changed images that `watch --fit` measures, and by the other splits (isotonic regression, one left out).

`splits.json` has the names of the classes by split: `{"1": {"train": [...], "test": [...]}}`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from unimetric import metrics
from unimetric.analysis.canvas import Canvas
from unimetric.deploy.audit import read_gallery
from unimetric.deploy.index import Index
from unimetric.deploy.watch import _distances, _project, open_curve, predict_recall
from unimetric.geometry.space import Space

MOST = 4000


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    with Index.open(path, device="cpu") as index:
        gallery, _ = read_gallery(index, label="label", progress=lambda name, done, total: None)
        return gallery.space.points.double().numpy(), np.array([str(label) for label in gallery.labels])


def compare(gallery: np.ndarray, queries: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the distance of queries beyond that of the gallery itself, and their recall."""
    numbers = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    recall = float(metrics.recall(Space(torch.from_numpy(queries), numbers), k=1))
    some = np.random.default_rng(0).permutation(len(queries))[: min(MOST, len(gallery) // 2)]
    null, distance = _distances(*_project(gallery, queries[some]), draws=20)
    return {"excess": distance - float(null.mean()), "recall": recall}


def predict_from_others(rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        others = [each for place, each in enumerate(rows) if place != number]
        curve = {key: [each[key] for each in others] for key in ("excess", "recall")}
        row["from_splits"] = predict_recall(curve, row["excess"])


def study(path: str, splits: dict[str, Any], foreign: list[str]) -> dict[str, Any]:
    points, labels = read(path)
    rows = []
    for name, split in splits.items():
        train, test = (np.isin(labels, split[part]) for part in ("train", "test"))
        assert train.any() and test.any(), f"{path}: no class of split {name}"
        rows.append({"name": f"split {name}"} | compare(points[train], points[test], labels[test]))
        print(rows[-1], flush=True)
    predict_from_others(rows)
    with Index.open(path, device="cpu") as index:
        changed = open_curve(index, fit=True, progress=None)
    assert changed is not None
    others = [{"name": Path(each).stem} | compare(points, *read(each)) for each in foreign]
    curve = {key: [row[key] for row in rows] for key in ("excess", "recall")}
    for row in others:
        row["from_splits"] = predict_recall(curve, row["excess"])
    for row in rows + others:
        row["from_changes"] = predict_recall(changed, row["excess"])
        kinds = {kind: row[kind] for kind in ("from_splits", "from_changes")}
        texts = [f"{kind} {each['expected']:.3f} ({each['low']:.3f} to {each['high']:.3f})" for kind, each in kinds.items()]
        print(f"{row['name']:<12} excess {row['excess']:.4f}  recall {row['recall']:.3f}  {'  '.join(texts)}", flush=True)
    every = {"splits": rows, "splits and datasets": rows + others}
    correlation = {
        name: float(stats.spearmanr([row["excess"] for row in some], [row["recall"] for row in some])[0]) for name, some in every.items()
    }
    print("rank correlation of distance and recall:", correlation)
    return {"rows": rows + others, "changed": changed, "correlation": correlation}


def draw(found: dict[str, Any], out: Path) -> None:
    with Canvas(out, width=9, height=4.2, rows=1, columns=2) as axes:
        left, right = np.ravel(axes)
        left.plot(found["changed"]["excess"], found["changed"]["recall"], "x", color="grey", label="changed images of the gallery")
        for row in found["rows"]:
            left.plot(row["excess"], row["recall"], "o" if row["name"].startswith("split") else "s", label=row["name"])
        left.set(xlabel="Frechet distance beyond that of the gallery", ylabel="measured recall@1")
        left.legend(frameon=False, fontsize=6)
        for kind, marker in (("from_splits", "o"), ("from_changes", "x")):
            spread = np.array(
                [[row[kind]["expected"] - row[kind]["low"], row[kind]["high"] - row[kind]["expected"]] for row in found["rows"]]
            )
            places = [row[kind]["expected"] for row in found["rows"]]
            measured = [row["recall"] for row in found["rows"]]
            right.errorbar(places, measured, xerr=spread.T, fmt=marker, capsize=2, label=kind.replace("_", " the "))
        right.plot([0, 1], [0, 1], ":", color="grey")
        right.set(xlabel="predicted recall@1", ylabel="measured recall@1")
        right.legend(frameon=False, fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("splits", type=Path)
    parser.add_argument("--foreign", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    found = study(arguments.index, json.loads(arguments.splits.read_text()), arguments.foreign)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    if arguments.figure:
        draw(found, arguments.figure)


if __name__ == "__main__":
    main()
