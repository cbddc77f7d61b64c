"""Precision and recall of two audits on an index with labels, next to other methods.

    python benchmarks/audits.py my.index [--copies 100] [--seed 1]

Duplicates: copies of images of the gallery (resized, compressed again, cropped, mirrored) are added, and the pairs that
an audit reports are compared with them. Copies that the audit finds in the dataset itself are excluded. The baseline is
the perceptual hash of `images/duplicates.py`.

Labels: 5 and 10 % of the labels are replaced by random other ones. The baseline is cleanlab (Northcutt et al., JAIR
2021), if it is installed, with out-of-sample probabilities of a logistic regression on the embeddings.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from unimetric.audits.near_duplicates import near_duplicates
from unimetric.audits.suspicious_labels import suspicious_labels
from unimetric.deploy.audit import read_gallery
from unimetric.deploy.index import Index
from unimetric.geometry.space import Space
from unimetric.images.duplicates import find_duplicates, hash_image
from unimetric.kinds import Audited


def compress(image: Image.Image) -> Image.Image:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=40)
    return Image.open(out).convert("RGB")


def crop(image: Image.Image) -> Image.Image:
    width, height = image.size
    left, top = 0.17 * width, 0.06 * height
    return image.crop((int(left), int(top), int(left + 0.8 * width), int(top + 0.8 * height)))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "resized": lambda image: image.resize((image.width // 2, image.height // 2)),
    "compressed": compress,
    "cropped": crop,
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def score(reported: set, true: set) -> dict[str, float]:
    hits = len(reported & true)
    return {"precision": round(hits / max(len(reported), 1), 3), "recall": round(hits / max(len(true), 1), 3), "reported": len(reported)}


def duplicates(index: Index, gallery: Audited, copies: int, seed: int) -> dict[str, Any]:
    """Score the pairs of a copy and an image. Pairs with a copy of the original that is in the dataset itself are not counted."""
    rows = np.random.default_rng(seed).permutation(len(gallery.ids))[: copies * len(CHANGES)]
    known = {id_: set(group.ids) for group in near_duplicates(gallery).groups for id_ in group.ids}
    images: dict[str, np.ndarray] = {}
    origin: dict[str, tuple[str, str]] = {}
    for number, row in enumerate(rows):
        change, id_ = list(CHANGES)[number % len(CHANGES)], gallery.ids[row]
        pixels = gallery.read(id_)
        if pixels is not None:
            images[f"copy {row}"] = np.asarray(CHANGES[change](Image.fromarray(pixels)))
            origin[f"copy {row}"] = (id_, change)
    points = torch.cat([gallery.space.points, torch.nn.functional.normalize(torch.from_numpy(index.embed(list(images.values()))), dim=1)])
    ids = [*gallery.ids, *images]

    def read(id_: str) -> np.ndarray | None:
        return images[id_] if id_ in images else gallery.read(id_)

    def judge(pairs: set[tuple[str, str]]) -> dict[str, Any]:
        """Return the scores by change. A pair is the id of a copy, and that of an image that is reported with it."""
        found = {}
        for change in CHANGES:
            some = {pair for pair in pairs if origin[pair[0]][1] == change}
            some = {(copy, id_) for copy, id_ in some if id_ == origin[copy][0] or id_ not in known.get(origin[copy][0], ())}
            found[change] = score(some, {(copy, id_) for copy, (id_, kind) in origin.items() if kind == change})
        return found

    begun = time.monotonic()
    groups = near_duplicates(Audited(Space(points, np.zeros(len(points), np.int64)), ids, [None] * len(ids), {}, read)).groups
    seconds = time.monotonic() - begun
    ours = {(one, other) for group in groups for one in group.ids for other in group.ids if one in origin and other not in origin}
    hashes = np.stack([hash_image(pixels) for id_ in ids if (pixels := read(id_)) is not None])
    near = find_duplicates(hashes[len(gallery.ids) :], hashes[: len(gallery.ids)])
    hashed = {(ids[len(gallery.ids) + row], ids[other]) for row, other in enumerate(near) if other >= 0}
    found = {"near_duplicates": judge(ours), "perceptual hash": judge(hashed)}
    for name, scores in found.items():
        for change, each in scores.items():
            print(f"{change:<11} {name:<16} {each}", flush=True)
    return found | {"copies": len(images), "seconds": round(seconds, 1), "images in copies of the dataset": len(known)}


def labels(gallery: Audited, seed: int) -> dict[str, Any]:
    names = sorted({str(label) for label in gallery.labels})
    truth = np.array([names.index(str(label)) for label in gallery.labels])
    results: dict[str, Any] = {}
    for fraction in (0.05, 0.10):
        rng = np.random.default_rng(seed)
        wrong = rng.permutation(len(truth))[: int(fraction * len(truth))]
        given = truth.copy()
        given[wrong] = (truth[wrong] + rng.integers(1, len(names), len(wrong))) % len(names)
        noisy = Audited(gallery.space, gallery.ids, [names[each] for each in given], {}, gallery.read)
        true = {gallery.ids[row] for row in wrong}
        ranked = {"suspicious_labels": [row["id"] for row in suspicious_labels(noisy).rows]} | run_cleanlab(gallery, given)
        for name, found in ranked.items():
            each = score(set(found), true) | {"precision of the first": score(set(found[: len(true)]), true)["precision"]}
            results.setdefault(f"{100 * fraction:.0f} %", {})[name] = each
            print(f"{100 * fraction:.0f} % wrong  {name:<18} {each}, {len(true)} true", flush=True)
    return results


def run_cleanlab(gallery: Audited, given: np.ndarray) -> dict[str, list[str]]:
    """Return the ids that cleanlab reports, with probabilities of two classifiers; nothing if it is not installed."""
    try:
        from cleanlab.filter import find_label_issues
    except ImportError:
        print("cleanlab is not installed")
        return {}
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    found = {}
    for strength in (10, 100):
        model = LogisticRegression(C=strength, max_iter=200)
        chances = cross_val_predict(model, gallery.space.points.numpy(), given, cv=3, method="predict_proba")
        issues = find_label_issues(given, chances, return_indices_ranked_by="self_confidence", n_jobs=1)
        found[f"cleanlab, C={strength}"] = [gallery.ids[row] for row in issues]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("--copies", type=int, default=100, help="number of copies per change")
    parser.add_argument("--seed", type=int, default=0, help="seed of the wrong labels and of the copied images")
    parser.add_argument("--only", choices=["labels", "duplicates"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with Index.open(arguments.index, device="cpu") as index:
        gallery, _ = read_gallery(index, label="label", progress=lambda name, done, total: None)
        print(f"{len(gallery.ids):,} images, {len(set(gallery.labels))} classes, {index.facts.backbone}", flush=True)
        if arguments.only != "duplicates":
            found["labels"] = labels(gallery, arguments.seed)
        if arguments.only != "labels":
            found["duplicates"] = duplicates(index, gallery, arguments.copies, arguments.seed)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
