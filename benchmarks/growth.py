"""How cost grows: a pair loss with the batch, a proxy loss with the classes, and an exact search with the gallery.

    python benchmarks/growth.py --json growth.json --figure growth.png
    python benchmarks/growth.py --read growth.json --figure growth.png       # draw a stored result
    python benchmarks/growth.py --only gallery --sizes 10000,100000

Losses are compared with pytorch-metric-learning, forward and backward, not compiled; the search of 1,000 queries for 10 neighbors with
faiss (`IndexFlatIP`). Every size of every library has a process of its own, which ends at a limit of time (`--limit`) or of memory
(`--gib`). A larger size of a library that failed is not tried. Times are medians of at least three turns; the libraries alternate by size.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _alone import run_alone
from _machine import Stolen, processor

from unimetric.analysis.canvas import Canvas
from unimetric.geometry.nearest import nearest
from unimetric.spec import create

DIM, BATCH, QUERIES, K = 128, 112, 1000, 10
LIBRARIES = ("unimetric", "other")
Step = Callable[[], Any]


def _backward(loss: Any, classes: int, batch: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(batch, DIM, generator=generator).requires_grad_()
    labels = torch.arange(batch) // 4 if classes * 4 >= batch else torch.randint(classes, (batch,), generator=generator)
    return lambda: loss(embeddings, labels).backward()


def by_batch(library: str, batch: int) -> Step:
    """Return a step of the multi-similarity loss over all pairs of a batch."""
    if library == "unimetric":
        return _backward(create("losses", "multi_similarity(beta=50.0)", miner="all"), batch, batch)
    from pytorch_metric_learning.losses import MultiSimilarityLoss

    return _backward(MultiSimilarityLoss(), batch, batch)


def by_classes(library: str, classes: int) -> Step:
    """Return a step of ArcFace, with the gradient of all class directions."""
    if library == "unimetric":
        return _backward(create("losses", "arcface(fallback=True)", num_classes=classes, dim=DIM, batch_size=BATCH), classes, BATCH)
    from pytorch_metric_learning.losses import ArcFaceLoss

    return _backward(ArcFaceLoss(classes, DIM, margin=math.degrees(0.5), scale=16), classes, BATCH)


def by_gallery(library: str, images: int) -> Step:
    """Return an exact search of a gallery."""
    generator = torch.Generator().manual_seed(0)
    gallery = torch.nn.functional.normalize(torch.randn(images, DIM, generator=generator))
    queries = torch.nn.functional.normalize(torch.randn(QUERIES, DIM, generator=generator))
    if library == "unimetric":
        return lambda: [near.sum() for _, _, near in nearest(queries, gallery, K)]
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(DIM)
    index.add(gallery.numpy())
    return lambda: index.search(queries.numpy(), K)


#: Function, sizes, title, name of the axis, and the other library.
SUBJECTS: dict[str, tuple[Callable[[str, int], Step], tuple[int, ...], str, str, str]] = {
    "batch": (by_batch, tuple(2**power for power in range(6, 14)), "multi-similarity loss", "images per batch", "pytorch-metric-learning"),
    "classes": (by_classes, tuple(10**power for power in range(2, 7)), "ArcFace, batch 112", "classes", "pytorch-metric-learning"),
    "gallery": (by_gallery, tuple(10**power for power in range(4, 8)), "exact search, 1,000 queries", "gallery images", "faiss"),
}


def measure(subject: str, library: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of the time and the processor time of a step in milliseconds, and the peak of the process in MiB."""
    torch.set_num_threads(options.threads)
    try:
        step = SUBJECTS[subject][0](library, size)
        room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + int(options.gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        step()  # allocates
        walls, used, end = [], [], time.perf_counter() + 1
        while len(walls) < 3 or time.perf_counter() < end:
            begun, own = time.perf_counter(), time.process_time()
            step()
            walls.append(1000 * (time.perf_counter() - begun))
            used.append(1000 * (time.process_time() - own))
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        return {"failed": f"memory: {str(error).splitlines()[0][:100]}"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"milliseconds": statistics.median(walls), "processor_milliseconds": statistics.median(used), "peak_mib": round(peak)}


def measure_alone(subject: str, library: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `measure` does in a process of its own, or why it failed."""
    try:
        return run_alone(measure, subject, library, size, options, limit=options.limit)
    except TimeoutError:
        return {"failed": f"over {options.limit:g} s"}
    except EOFError:
        return {"failed": "memory: the process was killed"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the time against the size, one panel per subject. Lines end where a library failed."""
    with Canvas(path, width=12, height=3.8, rows=1, columns=len(found["subjects"])) as panels:
        for axes, (subject, rows) in zip(panels[0], found["subjects"].items(), strict=True):
            _, _, title, axis, other = SUBJECTS[subject]
            for library, color in zip(LIBRARIES, ("C0", "C1"), strict=True):
                points = [(row["size"], row[library]["milliseconds"]) for row in rows if "milliseconds" in row.get(library, {})]
                name = "Unimetric" if library == "unimetric" else other
                axes.loglog(*zip(*points, strict=True), marker="o", color=color, label=name)
                if points and any("failed" in row.get(library, {}) for row in rows):
                    axes.loglog(*points[-1], marker="x", markersize=11, color=color)
            axes.set(xlabel=axis, ylabel="milliseconds", title=title)
            axes.legend(frameon=False, fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, separated by commas")
    parser.add_argument("--sizes", default="", help="sizes, separated by commas (default: those of each subject)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds of a process")
    parser.add_argument("--gib", type=float, default=12, help="memory of a process")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--read", type=Path, help="file of earlier results, which are only drawn")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    options = parser.parse_args()
    stolen = Stolen()
    found: dict[str, Any] = json.loads(options.read.read_text()) if options.read else {"processor": processor(), "subjects": {}}
    for subject in () if options.read else options.only.split(","):
        rows = found["subjects"][subject] = []
        failed: set[str] = set()
        for size in map(int, options.sizes.split(",")) if options.sizes else SUBJECTS[subject][1]:
            row = {library: measure_alone(subject, library, size, options) for library in LIBRARIES if library not in failed}
            failed |= {library for library, each in row.items() if "failed" in each}
            rows.append({"size": size, **row})
            print(subject, json.dumps(rows[-1]), flush=True)
    if not options.read:
        found["stolen"] = str(stolen)
        print(found["processor"], found["stolen"], sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
