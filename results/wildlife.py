"""Compare random with leak-free splits of animal identities, and check calibrated thresholds, on saved embeddings.

    python results/wildlife.py CTai=ctai.npz CZoo=czoo.npz Nyala=nyala.npz --network "DINOv2 ViT-S/14" --commit 1a2b3c4 --device CPU
    python results/wildlife.py Flowers-102=flowers.npz CUB200=cub.npz --network EfficientNet-Lite0 --commit 1a2b3c4 --device CPU

A file has the `embeddings` (N, D) of all images, and the identity (`names`) and path (`paths`) of each, as `unimetric evaluate --save`
writes them. The first number of a file name is that of the photo. `BLOCK` neighboring photos are a block.

For each seed, identities are divided at random: 0.4 train, 0.2 are validation classes, 0.4 are tested.

- Random: half of the test images, drawn at random, are queries, the others the gallery.
- Leak-free: the same, but whole blocks are drawn, and training images of photos that show a held-out identity are left out (`by_group`).

The tuned model is a linear head of Unimetric on the stored features, with the backbone frozen: no image is read and none is augmented.
It starts as a rotation, that is, at the raw features. Its epoch is the best one on the validation classes; epoch 0 may be the best.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unimetric import create
from unimetric.files import write_text
from unimetric.geometry.pair_scores import PairScores, quantiles
from unimetric.geometry.space import Space
from unimetric.images.table import Split, Table
from unimetric.metrics import measure
from unimetric.splits.by_group import drop_shared

#: Photos per block. The photos of Nyala are numbered by encounter: both flanks of an animal have one number.
BLOCK = {"CTai": 50, "CZoo": 50, "Nyala": 1}
#: False positive rate of pairs of the table of splits, and of the check of thresholds.
RATE, CHECKED = 0.001, 0.01
SEEDS, EPOCHS, EVERY, LEVEL = 3, 60, 10, 0.95
LOSS = "proxy_anchor(lr=1e-2)"


@dataclass
class Stored:
    """Saved embeddings, and the table of their images with photos as groups."""

    features: Tensor
    table: Table
    block: np.ndarray


def read(name: str, path: str) -> Stored:
    """Read a file of embeddings. Identities of a single block cannot be tested without a leak and are left out."""
    with np.load(path) as file:
        features, names, paths = torch.from_numpy(file["embeddings"]), file["names"], file["paths"].tolist()
    photo = block = np.arange(len(paths))
    if name in BLOCK:
        photo = np.array([int(re.findall(r"\d+", Path(each).name)[0]) for each in paths])
        block = photo // BLOCK[name]
    labels = np.unique(names, return_inverse=True)[1]
    kept = np.array([len(np.unique(block[labels == label])) > 1 for label in range(labels.max() + 1)])[labels]
    class_names, labels = np.unique(names[kept], return_inverse=True)
    numbers, group = np.unique(photo[kept], return_inverse=True)
    table = Table(
        paths=tuple(np.array(paths)[kept].tolist()),
        labels=labels,
        class_names=tuple(class_names.tolist()),
        train=np.zeros(len(labels), bool),
        group=group,
        group_names=tuple(map(str, numbers)),
        group_rule="none",
    )
    return Stored(features[torch.from_numpy(kept)], table, block[kept])


def divide(table: Table, seed: int, *, train: float = 0.4, validation: float = 0.2) -> Split:
    """Return a random division of the identities."""
    order = np.random.default_rng(seed).permutation(len(table.class_names))
    ends = np.cumsum([round(train * len(order)), round(validation * len(order))])
    parts = [np.flatnonzero(np.isin(table.labels, some)) for some in np.split(order, ends)]
    return Split(train=parts[0], validation=parts[1], test=parts[2])


def choose_queries(blocks: np.ndarray, seed: int) -> np.ndarray:
    """Return a mask of the queries: half of the images, in whole blocks."""
    rng = np.random.default_rng(seed)
    numbers, counts = np.unique(blocks, return_counts=True)
    order = rng.permutation(len(numbers))
    chosen = order[: 1 + int(np.searchsorted(counts[order].cumsum(), len(blocks) / 2))]
    return np.isin(blocks, numbers[chosen])


def space_of(features: Tensor, stored: Stored, rows: np.ndarray) -> Space:
    """Return the space of some rows, where pairs of one identity and photo do not count."""
    table = stored.table
    return Space(features[rows], torch.from_numpy(table.labels[rows]), group=table.group[rows], group_rule="class")


def tune(stored: Stored, train: np.ndarray, validation: np.ndarray, seed: int) -> tuple[Tensor, int]:
    """Return the embeddings of all images by a linear head that is trained on stored features, and its epoch."""
    torch.manual_seed(seed)
    features = torch.nn.functional.normalize(stored.features)
    tokens, dim = features[:, None], features.shape[1]
    labels = np.unique(stored.table.labels[train], return_inverse=True)[1]
    head = create("heads", f"linear(dim={dim}, orthogonal=True)", features=dim)
    loss_of = create("losses", LOSS, num_classes=int(labels.max()) + 1, dim=dim)
    sampler = create("samplers", "samples_per_class(n=4)", labels=labels, batch_size=64, seed=seed)
    groups = [{"params": head.parameters()}, {"params": loss_of.parameters(), "lr": loss_of.lr}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, weight_decay=1e-4)
    best: tuple[float, int, Tensor] | None = None
    for epoch in range(EPOCHS + 1):
        if epoch:
            sampler.epoch = epoch
            for batch in sampler.plan():
                loss = loss_of(head(tokens[train[batch]]), torch.from_numpy(labels[batch]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if epoch % EVERY:
            continue
        with torch.no_grad():
            embeddings = head(tokens)
        score = measure(space_of(embeddings, stored, validation), ["map"])["map"]
        if best is None or score > best[0]:
            best = (score, epoch, embeddings)
    assert best is not None
    return best[2], best[1]


def calibrate(validation: Space, test: Space, rate: float) -> dict[str, Any]:
    """Return a threshold of validation classes with intervals, and its error rate on test classes."""
    chosen, other = PairScores(validation), PairScores(test)
    threshold = chosen.threshold(rate)
    low, high = quantiles(chosen.resample(threshold=threshold).fmr, LEVEL)
    return {
        "threshold": threshold,
        "threshold_interval": quantiles(chosen.resample(fmr=rate).threshold, LEVEL),
        "interval": (low, high),
        "test": other.rates(threshold).fmr,
        "test_interval": quantiles(other.resample(threshold=threshold).fmr, LEVEL),
    }


def evaluate(features: Tensor, stored: Stored, split: Split, seed: int, *, leaks: bool) -> dict[str, Any]:
    """Return the metrics of one division of identities, with a random or a leak-free choice of queries."""
    table, rows = stored.table, split.test
    query = choose_queries(np.arange(len(rows)) if leaks else stored.block[rows], seed)
    closed = Space(features[rows], torch.from_numpy(table.labels[rows]), query=query, gallery=~query)
    found: dict[str, Any] = measure(closed, ["cmc(k=1)", "map"])
    classes = np.random.default_rng(seed).permutation(np.unique(table.labels[rows]))
    unknown = np.isin(table.labels[rows], classes[: len(classes) // 2])
    opened = Space(features[rows], torch.from_numpy(table.labels[rows]), query=query, gallery=~query & ~unknown)
    calibrated = calibrate(space_of(features, stored, split.validation), space_of(features, stored, rows), RATE)
    threshold = calibrated["threshold"]
    for name in ("baks", "baus"):
        found[name] = measure(opened, [f"{name}(threshold={threshold!r})"]).popitem()[1]
    return found | calibrated | {"queries": int(query.sum()), "unmatched": closed.unmatched}


def compare(name: str, stored: Stored) -> dict[str, dict[str, Any]]:
    """Return the rows of the table of splits: raw and tuned features under random and leak-free splits."""
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {(model, leaks): [] for model in ("raw", "tuned") for leaks in (True, False)}
    for seed in range(SEEDS):
        split = divide(stored.table, seed)
        raw = torch.nn.functional.normalize(stored.features)
        for leaks in (True, False):
            own = split if leaks else drop_shared(stored.table, split)
            tuned, epoch = tune(stored, own.train, own.validation, seed)
            facts = {"train": len(own.train), "epoch": epoch}
            found["raw", leaks].append(evaluate(raw, stored, own, seed, leaks=leaks))
            found["tuned", leaks].append(evaluate(tuned, stored, own, seed, leaks=leaks) | facts)
            results = [found[model, leaks][-1] for model in ("raw", "tuned")]
            print(name, seed, "random" if leaks else "leak-free", *results, flush=True)
    return {
        f"wildlife_{name}_{model}".lower(): describe(f"{name}, {model}", found[model, True], found[model, False])
        for model in ("raw", "tuned")
    }


def describe(label: str, random: list[dict[str, Any]], free: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table of splits from the results of each seed."""
    row: dict[str, Any] = {"label": label}
    for metric in ("cmc(k=1)", "map", "baks", "baus"):
        row[metric.partition("(")[0]] = "→".join(_spread([100 * each[metric] for each in found]) for found in (random, free))
    row["leak"] = _spread([100 * (one["cmc(k=1)"] - two["cmc(k=1)"]) for one, two in zip(random, free, strict=True)])
    return row | {"threshold": _interval(free[0]), "seeds": {"random": random, "free": free}}


def check(name: str, stored: Stored) -> dict[str, Any]:
    """Return the row of the check of thresholds: raw features, half of the classes choose the threshold, half test it."""
    raw, found = torch.nn.functional.normalize(stored.features), []
    for seed in range(SEEDS):
        split = divide(stored.table, seed, train=0.0, validation=0.5)
        found.append(calibrate(space_of(raw, stored, split.validation), space_of(raw, stored, split.test), CHECKED))
        print(name, seed, found[-1], flush=True)
    return describe_check(name, found) | {"classes": len(stored.table.class_names), "images": len(stored.table)}


def describe_check(label: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the check of thresholds from the results of each seed."""
    inside = [each["interval"][0] <= each["test"] <= each["interval"][1] for each in found]
    return {
        "label": label,
        "threshold": _interval(found[0]),
        "printed": "{:.2f}\u2013{:.2f}".format(*(100 * end for end in found[0]["interval"])),
        "measured": f"{100 * found[0]['test']:.2f}",
        "holds": "yes" if inside[0] else "no",
        "count": f"{sum(inside)}/{len(found)}",
        "seeds": found,
    }


def _interval(found: dict[str, Any]) -> str:
    return "{:.2f}[{:.2f},{:.2f}]".format(found["threshold"], *found["threshold_interval"])


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f}±{statistics.stdev(values):.1f}"


def main() -> None:
    """Compute the records of some files, and store them next to those of others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="NAME=FILE; a name of BLOCK is compared, too")
    parser.add_argument("--network", required=True, help="name of the network of the embeddings")
    parser.add_argument("--into", default="results/wildlife.json")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(arguments.into)
    source = {key: getattr(arguments, key) for key in ("network", "device", "commit")} | {"date": datetime.date.today().isoformat()}
    for text in arguments.files:
        name, _, path = text.partition("=")
        stored = read(name, path)
        records = (compare(name, stored) if name in BLOCK else {}) | {f"threshold_{name}".lower(): check(name, stored)}
        command = f"python results/wildlife.py {name}={Path(path).name} --network '{arguments.network}'"
        kept = json.loads(file.read_text(encoding="utf-8"))["benchmarks"] if file.exists() else {}
        content = {"benchmarks": kept | {key: _rounded(row) | source | {"command": command} for key, row in records.items()}}
        write_text(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
