"""Whether `unimetric watch` predicts recall: published splits of growing shift, other datasets, and changed images.

    python benchmarks/watch.py cars.index splits.json --foreign flowers.index cub.index products.index --out watch.json --figure watch.png

For each split, the gallery is its training classes and the queries are its test classes. For another dataset, the gallery is the whole
first index. Recall@1 is that of the queries among each other, which needs labels. Three signals that need none are compared:

    excess      Frechet distance of the queries from the gallery, beyond that of the gallery itself
    score       mean similarity of a query to its nearest neighbor
    contrast    mean similarity to the nearest neighbor, less that to the tenth

Recall is predicted from each signal in two ways: by the other splits (isotonic regression, one left out), and, for the distance, by the
curve of changed images that `watch --fit` measures.

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

from unimetric.analysis.canvas import Canvas
from unimetric.deploy.audit import read_gallery
from unimetric.deploy.index import Index
from unimetric.deploy.watch import Reference, _fit, open_curve, predict_recall
from unimetric.geometry.space import Space

MOST, SIGNALS = 4000, ("excess", "score", "contrast")


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    with Index.open(path, device="cpu") as index:
        gallery, _ = read_gallery(index, label="label", progress=lambda name, done, total: None)
        return gallery.space.points.float().numpy(), np.array([str(label) for label in gallery.labels])


def compare(reference: Reference, queries: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the signals of queries, and their recall."""
    numbers = np.unique(labels, return_inverse=True)[1]
    near, scores = Space(torch.from_numpy(queries), torch.from_numpy(numbers)).neighbors(10, scores=True)
    some = np.random.default_rng(0).permutation(len(queries))[: min(MOST, len(reference.points) // 2)]
    return {
        "excess": reference.distance(queries[some]) - float(reference.null(len(some), 50).mean()),
        "score": float(scores[:, 0].mean()),
        "contrast": float((scores[:, 0] - scores[:, 9]).mean()),
        "recall": float((numbers[near[:, 0].numpy()] == numbers).mean()),
        "classes": int(numbers.max()) + 1,
        "images": len(queries),
    }


def study(path: str, splits: dict[str, Any], foreign: list[str]) -> dict[str, Any]:
    points, labels = read(path)
    rows: list[dict[str, Any]] = []
    for name, split in splits.items():
        train, test = (np.isin(labels, split[part]) for part in ("train", "test"))
        assert train.any() and test.any(), f"{path}: no class of split {name}"
        rows.append({"name": f"split {name}"} | compare(Reference(points[train]), points[test], labels[test]))
        print(rows[-1], flush=True)
    reference, count = Reference(points), len(rows)
    for each in foreign:
        rows.append({"name": Path(each).stem} | compare(reference, *read(each)))
        print(rows[-1], flush=True)
    with Index.open(path, device="cpu") as index:
        changed = open_curve(index, fit=True, progress=lambda done, total: print(f"changed images: {done} of {total}", flush=True))
    assert changed is not None
    for number, row in enumerate(rows):
        others = [each for place, each in enumerate(rows[:count]) if place != number]
        for name in SIGNALS:
            x, y = (np.array([each[key] for each in others]) for key in (name, "recall"))
            row[f"by {name}"] = float(_fit(x, y, np.array([row[name]]), name)[0])
        row["by changes"] = predict_recall(changed, excess=row["excess"])
    return {"rows": rows, "changed": changed, "summary": summarize(rows, count, changed)}


def summarize(rows: list[dict[str, Any]], count: int, changed: dict[str, Any]) -> dict[str, Any]:
    """Return the rank correlation of each signal with recall, and the mean error of its predictions."""
    found: dict[str, Any] = {}
    for name in SIGNALS:
        for title, some in (("splits", rows[:count]), ("splits and datasets", rows)):
            found[f"{name}, {title}"] = round(float(stats.spearmanr([r[name] for r in some], [r["recall"] for r in some]).statistic), 2)
        for title, some in (("splits", rows[:count]), ("datasets", rows[count:])):
            found[f"error by {name}, {title}"] = round(float(np.mean([abs(r[f"by {name}"] - r["recall"]) for r in some])), 3)
    for title, some in (("splits", rows[:count]), ("datasets", rows[count:])):
        found[f"error by changes, {title}"] = round(float(np.mean([abs(r["by changes"]["expected"] - r["recall"]) for r in some])), 3)
    for name in ("excess", "score"):
        each = predict_recall(changed, **{name: 0.0})
        found[f"{name}, changed images"], found[f"error by {name}, changed images"] = round(each["correlation"], 2), round(each["error"], 3)
    for key, value in found.items():
        print(f"{key:<36} {value}")
    return found


def draw(found: dict[str, Any], out: Path) -> None:
    with Canvas(out, width=12, height=3.8, rows=1, columns=3) as axes:
        left, middle, right = np.ravel(axes)
        for axis, name in ((left, "excess"), (middle, "contrast")):
            for row in found["rows"]:
                axis.plot(row[name], row["recall"], "o" if row["name"].startswith("split") else "s", label=row["name"])
        left.set(xlabel="Fréchet distance beyond that of the gallery", ylabel="measured recall@1")
        left.set_xscale("log")
        middle.set(xlabel="contrast of the neighbors", ylabel="measured recall@1")
        middle.legend(frameon=False, fontsize=6, ncols=2)
        measured = [row["recall"] for row in found["rows"]]
        right.plot([row["by excess"] for row in found["rows"]], measured, "o", label="by distance, from the other splits")
        right.plot([row["by contrast"] for row in found["rows"]], measured, "^", label="by contrast, from the other splits")
        right.plot([row["by changes"]["expected"] for row in found["rows"]], measured, "x", label="by distance, from changed images")
        right.plot([0, 1], [0, 1], ":", color="grey")
        right.set(xlabel="predicted recall@1", ylabel="measured recall@1", xlim=(0, 1), ylim=(0, 1))
        right.legend(frameon=False, fontsize=6)


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
