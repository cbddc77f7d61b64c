"""Time and memory of a step of a proxy loss with very many classes, with all of them and with a sample.

    python benchmarks/classes.py                                              # CPU: 100,000 classes x 128
    python benchmarks/classes.py --device cuda --classes 1000000 --dim 512 --batch 1024 --negatives 1,0.1

A step is the forward and backward pass of the loss and a step of Adam on its class directions. Extra memory is the peak during a
step beyond the directions, their gradient and the state of Adam, which are printed as `fixed`. Each case has a separate process.
On a shared machine, compare the processor time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _machine import Stolen, processor
from losses import peak, synchronize

from unimetric.spec import create

MIB = 2**20


def measure(options: argparse.Namespace, negatives: float) -> dict[str, Any]:
    """Return time and memory of steps with a fraction of the classes."""
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


def _send(options: argparse.Namespace, negatives: float, pipe: Any) -> None:
    torch.set_num_threads(options.threads)
    pipe.send(measure(options, negatives))


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
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    stolen, rows = Stolen(), []
    for negatives in map(float, options.negatives.split(",")):
        hear, speak = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(target=_send, args=(options, negatives, speak))
        process.start()
        speak.close()
        rows.append(hear.recv())
        process.join()
        print(json.dumps(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    settings = {key: getattr(options, key) for key in ("loss", "classes", "dim", "batch", "threads")}
    found = settings | {"device": device, "rows": rows, "stolen": str(stolen)}
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
