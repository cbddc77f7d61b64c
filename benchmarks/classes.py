"""Time and memory of a step of a proxy loss with very many classes, and retrieval, with all classes and with a sample.

    python benchmarks/classes.py                                              # CPU: 100,000 classes x 128
    python benchmarks/classes.py --device cuda --classes 1000000 --dim 512 --batch 1024 --negatives 1,0.1
    python benchmarks/classes.py --features products.npz --batch 16           # retrieval of unseen classes

A step is the forward and backward pass of the loss and a step of Adam on its class directions. Extra memory is the peak during a
step beyond the directions, their gradient and the state of Adam, which are printed as `fixed`. Each case has a separate process.
On a shared machine, compare the processor time.

With `--features`, a linear head is trained on the features of half of the classes, drawn by seed, and evaluated on the other
half. The file has `embeddings` and `labels`, as `unimetric evaluate --save` writes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _alone import run_alone
from _machine import Stolen, processor
from _timing import synchronize
from losses import peak

from unimetric.geometry.space import Space
from unimetric.metrics import measure as compute_metrics
from unimetric.spec import create

MIB = 2**20


def measure(options: argparse.Namespace, negatives: float) -> dict[str, Any]:
    """Return time and memory of steps with a fraction of the classes."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    spec = f"{options.loss}(negatives={negatives})"
    loss = create("losses", spec, num_classes=options.classes, dim=options.dim, batch_size=options.batch).to(options.device)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    embeddings = torch.randn(options.batch, options.dim, device=options.device, requires_grad=True)
    labels = torch.randint(options.classes, (options.batch,), device=options.device)

    def step(embeddings: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss(embeddings, labels).backward()
        optimizer.step()
        synchronize(embeddings.device)

    step(embeddings)
    walls, used = [], []
    for _ in range(options.steps):
        begun, own = time.perf_counter(), time.process_time()
        step(embeddings)
        walls.append(time.perf_counter() - begun)
        used.append(time.process_time() - own)
    return {
        "negatives": negatives,
        "milliseconds": round(1000 * statistics.median(walls), 1),
        "processor_milliseconds": round(1000 * statistics.median(used), 1),
        "extra_mib": round(peak(step, embeddings)[0] / MIB, 1),
        "fixed_mib": round(4 * loss.proxies.numel() * loss.proxies.element_size() / MIB, 1),
    }


def retrieve(options: argparse.Namespace, negatives: float, seed: int) -> dict[str, Any]:
    """Return metrics of unseen classes after training a linear head on frozen features."""
    stored = np.load(options.features, allow_pickle=False)
    features, (_, labels) = torch.from_numpy(stored["embeddings"]).float(), np.unique(stored["labels"], return_inverse=True)
    order = np.random.default_rng(seed).permutation(labels.max() + 1)
    seen = np.isin(labels, order[: len(order) // 2])
    inputs, classes = features[seen], torch.from_numpy(np.unique(labels[seen], return_inverse=True)[1])
    torch.manual_seed(seed)
    spec, number = f"{options.loss}(negatives={negatives})", int(classes.max()) + 1
    loss = create("losses", spec, num_classes=number, dim=options.dim, batch_size=options.batch)
    head = torch.nn.Linear(features.shape[1], options.dim)
    optimizer = torch.optim.Adam([{"params": head.parameters(), "lr": 1e-3}, {"params": loss.parameters(), "lr": loss.lr}])
    for _ in range(options.epochs):
        for rows in torch.randperm(len(inputs))[: len(inputs) // options.batch * options.batch].view(-1, options.batch):
            optimizer.zero_grad()
            loss(head(inputs[rows]), classes[rows]).backward()
            optimizer.step()
    names = ["recall(k=1)", "map_at_r"]
    with torch.no_grad():
        unseen = torch.from_numpy(labels[~seen])
        found = {"raw": features[~seen], "trained": head(features[~seen])}
    values = {
        key: {name: round(value, 4) for name, value in compute_metrics(Space(points, unseen), names).items()}
        for key, points in found.items()
    }
    return {"negatives": negatives, "used": max(options.batch, -int(-negatives * number // 1)), "classes": number, "seed": seed, **values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", default="arcface", help="name of the loss")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--negatives", default="1,0.1,0.01", help="fractions of the classes, separated by commas")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch on a CPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--features", type=Path, help=".npz file of features and labels: evaluate retrieval instead of timing steps")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of training on features")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of training on features")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    stolen, rows = Stolen(), []
    torch.set_num_threads(options.threads)
    for negatives in map(float, options.negatives.split(",")):
        for seed in range(options.seeds) if options.features else [None]:
            rows.append(run_alone(measure, options, negatives) if seed is None else retrieve(options, negatives, seed))
            print(json.dumps(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    settings = {key: getattr(options, key) for key in ("loss", "epochs" if options.features else "classes", "dim", "batch", "threads")}
    found = settings | {"device": device, "rows": rows, "stolen": str(stolen)}
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
