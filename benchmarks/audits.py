"""Precision and recall of two audits on an index with labels, next to other methods.

    python benchmarks/audits.py my.index [--copies 100]

Duplicates: copies of images of the gallery (resized, compressed again, cropped, mirrored) are added, and the pairs that
an audit reports are compared with them. Copies that the audit finds in the dataset itself are excluded. The baseline is
the perceptual hash of `images/duplicates.py`.

Labels: 5 and 10 % of the labels are replaced by random other ones. The baseline is cleanlab (Northcutt et al., JAIR
2021), if it is installed, with out-of-sample probabilities of a logistic regression on the embeddings.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from itertools import combinations

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


def score(reported: set, true: set) -> str:
    hits = len(reported & true)
    return (
        f"precision {hits / max(len(reported), 1):.3f}  recall {hits / max(len(true), 1):.3f}  ({len(reported)} reported, {len(true)} true)"
    )


def report(name: str, fraction: float, ranked: list[str], true: set[str]) -> None:
    first = set(ranked[: len(true)])
    print(f"{100 * fraction:.0f} % wrong  {name:<18} {score(set(ranked), true)}; first {len(true)}: {score(first, true)}", flush=True)


def duplicates(index: Index, gallery: Audited, copies: int) -> None:
    rows = np.random.default_rng(0).permutation(len(gallery.ids))[:copies]
    originals = {int(row): gallery.read(gallery.ids[row]) for row in rows}
    known = near_duplicates(gallery)
    own = {pair for group in known.groups for pair in combinations(sorted(group.ids), 2)}
    print(f"copies in the dataset itself: {len(known.groups)} groups, left out below")
    for name, change in CHANGES.items():
        images = {f"copy {row}": np.asarray(change(Image.fromarray(pixels))) for row, pixels in originals.items() if pixels is not None}
        embedded = torch.from_numpy(index.embed(list(images.values())))
        points = torch.cat([gallery.space.points, torch.nn.functional.normalize(embedded, dim=1)])
        ids = [*gallery.ids, *images]

        def read(id_: str, images: dict[str, np.ndarray] = images) -> np.ndarray | None:
            return images[id_] if id_ in images else gallery.read(id_)

        mixed = Audited(Space(points, np.zeros(len(points), np.int64)), ids, [None] * len(ids), {}, read)
        true = {tuple(sorted((id_, gallery.ids[int(id_[5:])]))) for id_ in images}
        begun = time.monotonic()
        found = near_duplicates(mixed)
        seconds = time.monotonic() - begun
        pairs = {pair for group in found.groups for pair in combinations(sorted(group.ids), 2)} - own
        print(f"{name:<11} near_duplicates   {score(pairs, true)}  {seconds:.0f} s", flush=True)
        hashes = np.stack([hash_image(read(id_)) for id_ in ids])  # type: ignore[arg-type]
        near = find_duplicates(hashes[len(gallery.ids) :], hashes[: len(gallery.ids)])
        hashed = {tuple(sorted((ids[len(gallery.ids) + row], ids[other]))) for row, other in enumerate(near) if other >= 0}
        print(f"{name:<11} perceptual hash   {score(hashed, true)}", flush=True)


def labels(gallery: Audited) -> None:
    names = sorted({str(label) for label in gallery.labels})
    truth = np.array([names.index(str(label)) for label in gallery.labels])
    for fraction in (0.05, 0.10):
        rng = np.random.default_rng(0)
        wrong = rng.permutation(len(truth))[: int(fraction * len(truth))]
        given = truth.copy()
        given[wrong] = (truth[wrong] + rng.integers(1, len(names), len(wrong))) % len(names)
        noisy = Audited(gallery.space, gallery.ids, [names[each] for each in given], {}, gallery.read)
        true = {gallery.ids[row] for row in wrong}
        found = [row["id"] for row in suspicious_labels(noisy).rows]
        report("suspicious_labels", fraction, found, true)
        try:
            from cleanlab.filter import find_label_issues
        except ImportError:
            print("cleanlab is not installed")
            continue
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import cross_val_predict

        model = LogisticRegression(C=10, max_iter=200)
        chances = cross_val_predict(model, gallery.space.points.numpy(), given, cv=3, method="predict_proba")
        issues = find_label_issues(given, chances, return_indices_ranked_by="self_confidence", n_jobs=1)
        ranked = [gallery.ids[row] for row in issues]
        report("cleanlab", fraction, ranked, true)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("--copies", type=int, default=100)
    arguments = parser.parse_args()
    with Index.open(arguments.index, device="cpu") as index:
        gallery, _ = read_gallery(index, label="label", progress=lambda name, done, total: None)
        print(f"{len(gallery.ids):,} images, {len(set(gallery.labels))} classes, {index.facts.backbone}")
        labels(gallery)
        duplicates(index, gallery, arguments.copies)


if __name__ == "__main__":
    main()
