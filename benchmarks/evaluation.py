"""Evaluation compared with other libraries, at the size of the test half of SOP.

That is 60,502 images of 11,316 classes, with 128 dimensions.

    python benchmarks/evaluation.py                    all subjects on the CPU (about ten minutes on two cores)
    python benchmarks/evaluation.py --device cuda
    python benchmarks/evaluation.py --only retrieval neighbors --rounds 3
    python benchmarks/evaluation.py --peer-path DIR    other libraries in a separate folder

The libraries alternate, so that a busy machine slows all of them; compare the ratios. A library that cannot be imported is skipped with a
message. Times are wall times; `cpu` is the processor time of all threads, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.geometry.kmeans import kmeans
from unimetric.geometry.nearest import nearest
from unimetric.metrics import Space, measure

IMAGES, CLASSES, DIM = 60_502, 11_316, 128
SECTION_7 = [
    *(f"recall(k={k})" for k in (1, 10, 100, 1000)),
    *("precision(k=10)", "r_precision", "map_at_r", "map_at_k(k=1000)", "map_at_k(k=1000, divide='class')", "mrr"),
    *("map_at_k(class_size=True, divide='class')", "nmi", "ami", "f1", "pi_intra", "pi_inter", "pi_ratio"),
    *("spectral_decay", "spectral_decay(drop_largest=0)", "class_spectra", "uniformity", "unified", "per_source", "harmonic"),
]


def stanford_online_products(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw points of the class sizes of SOP, about as hard as those of a trained model."""
    rng = np.random.default_rng(0)
    sizes = 2 + rng.binomial(10, (IMAGES / CLASSES - 2) / 10, CLASSES)
    sizes[0] = 12
    while (excess := int(sizes.sum()) - IMAGES) != 0:
        row = rng.integers(1, CLASSES)
        sizes[row] = np.clip(sizes[row] - np.sign(excess), 2, 12)
    labels = torch.from_numpy(rng.permutation(np.repeat(np.arange(CLASSES), sizes)))
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, DIM, generator=generator)
    points = centers[labels] + 1.5 * torch.randn(IMAGES, DIM, generator=generator)
    return torch.nn.functional.normalize(points, dim=1).to(device), labels.to(device)


@dataclass
class Clock:
    """Wall time, processor time and peak of the additional memory of calls."""

    device: str
    wall: float = 0.0
    cpu: float = 0.0
    peak: float = 0.0
    answer: Any = field(default=None, repr=False)

    def __call__(self, work: Callable[[], Any]) -> Any:
        gc.collect()
        stop, peak = threading.Event(), [0.0]
        watch = threading.Thread(target=self._watch, args=(stop, peak))
        held = self._held(restart=True)
        watch.start()
        wall, cpu = time.perf_counter(), time.process_time()
        self.answer = work()
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        stop.set()
        watch.join()
        top = torch.cuda.max_memory_allocated() if self.device != "cpu" else peak[0]
        self.peak = max(self.peak, top - held)
        return self.answer

    def _held(self, *, restart: bool = False) -> float:
        if self.device != "cpu":
            if restart:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return resource.getpagesize() * float(Path("/proc/self/statm").read_text().split()[1])  # resident

    def _watch(self, stop: threading.Event, peak: list[float]) -> None:
        """Record the peak of resident memory, which not every kernel reports."""
        while not stop.wait(0.005):
            if self.device == "cpu":
                peak[0] = max(peak[0], self._held())

    def line(self, name: str, note: str = "") -> None:
        print(f"  {name:<44} {self.wall:8.2f} s   cpu {self.cpu:8.2f} s   memory {self.peak / 2**20:7.0f} MiB   {note}", flush=True)


def peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library may fail in any way that its dependencies do
        print(f"  {name} is skipped: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def ratio(name: str, theirs: Clock, ours: Clock) -> None:
    print(f"  -> {name}: {theirs.wall / ours.wall:.2f}x by wall clock, {theirs.cpu / ours.cpu:.2f}x by processor time", flush=True)


def retrieval(device: str, rounds: int) -> None:
    print("P@1, MAP@R and R-precision: pytorch-metric-learning's AccuracyCalculator(k='max_bin_count'), and unimetric")
    points, labels = stanford_online_products(device)
    texts = ["precision(k=1)", "map_at_r", "r_precision"]
    ours, theirs = Clock(device), Clock(device)
    module = peer("pytorch_metric_learning.utils.accuracy_calculator")
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision")

    def accuracy_calculator() -> dict[str, float]:
        calculator = module.AccuracyCalculator(include=names, k="max_bin_count", device=torch.device(device))
        return calculator.get_accuracy(points, labels)

    for _ in range(rounds):
        ours(lambda: measure(Space(points, labels), texts))
        if module is not None:
            theirs(accuracy_calculator)
            ours(lambda: measure(Space(points, labels), texts))
    if module is not None:  # unimetric ran before and after each call of the other library
        ours.wall, ours.cpu = ours.wall / 2, ours.cpu / 2
    ours.line("unimetric", " ".join(f"{value:.6f}" for value in ours.answer.values()))
    if module is not None:
        theirs.line("pytorch-metric-learning", " ".join(f"{theirs.answer[name]:.6f}" for name in names))
        ratio("faster than pytorch-metric-learning (target: 4)", theirs, ours)


def neighbors(device: str, rounds: int, k: int = 1000) -> None:
    print(f"{k} neighbors of every image: a plain chunked matmul + topk, and unimetric (without the query, ties in order, labels compared)")
    points, labels = stanford_online_products(device)
    own = torch.arange(IMAGES, device=device)
    ours, bare, oml = Clock(device), Clock(device), Clock(device)
    found = {"ours": 0, "bare": 0}

    def search(rows: slice) -> None:
        for start, _, near in nearest(points[rows], points, k, own=own[rows]):
            asked = labels[rows][start : start + len(near), None]
            found["ours"] += int((labels[near] == asked).sum())

    def plain(rows: slice) -> None:
        for some in range(rows.start, rows.stop, 1024):
            near = (points[some : min(some + 1024, rows.stop)] @ points.T).topk(k).indices
            found["bare"] += len(near)

    step = 4096
    for _ in range(rounds):
        for start in range(0, IMAGES, step):
            rows = slice(start, min(start + step, IMAGES))
            bare(lambda rows=rows: plain(rows))
            ours(lambda rows=rows: search(rows))
    ours.line("unimetric", f"{found['ours']} matches")
    bare.line("matmul + topk")
    print(f"  -> unimetric takes {ours.wall / bare.wall:.2f} of the wall time, {ours.cpu / bare.cpu:.2f} of the cpu time (at most 1.3)")
    vars(np)["float_"] = np.float64  # open-metric-learning 3.1 uses a name that numpy 2 has removed
    knn, theirs = peer("oml.functional.knn"), peer("oml.functional.metrics")
    if knn is None or theirs is None:
        return
    some = 4096

    def open_metric_learning() -> Any:
        asked = (points[:some], points, k, labels[:some], labels, own[:some], own)
        _, retrieved, relevant = knn.batched_knn_qg(*asked)
        return theirs.calc_retrieval_metrics(retrieved, relevant, None, (1, 10, 100, 1000), (), (1000,), verbose=False)

    texts = ["recall(k=1)", "recall(k=10)", "recall(k=100)", "recall(k=1000)", "map_at_k(k=1000, divide='found')"]
    ours = Clock(device)
    ours(lambda: measure(Space(points, labels, query=own < some), texts))
    oml(open_metric_learning)
    ours.line(f"unimetric, {some} queries, R@1..1000, mAP@1000", " ".join(f"{value:.6f}" for value in ours.answer.values()))
    numbers = [*oml.answer["cmc"].values(), *oml.answer["map"].values()]
    oml.line(f"open-metric-learning, {some} queries, the same", " ".join(f"{float(value):.6f}" for value in numbers))
    ratio("faster than open-metric-learning", oml, ours)


def clustering(device: str, rounds: int, iterations: int = 5) -> None:
    print(f"k-means, {CLASSES} clusters: faiss, and unimetric")
    points, _ = stanford_online_products(device)
    ours, theirs = Clock(device), Clock(device)
    faiss = peer("faiss") if device == "cpu" else None
    for number in range(rounds):
        # Both compute the same number of assignments: faiss reports the objective of the last one, before the last update of the centers.
        ours(lambda number=number: kmeans(points, CLASSES, iterations=iterations - 1, seed=number))
        if faiss is not None:
            faiss.omp_set_num_threads(torch.get_num_threads())

            def train(number: int = number) -> float:
                model = faiss.Kmeans(DIM, CLASSES, niter=iterations, seed=number, min_points_per_centroid=1)
                model.train(points.numpy())
                return float(model.obj[-1])

            theirs(train)
    ours.line("unimetric", f"objective {float(ours.answer.objective):.1f}, {ours.wall / rounds / iterations:.3f} s per iteration")
    if faiss is not None:
        theirs.line("faiss", f"objective {theirs.answer:.1f}, {theirs.wall / rounds / iterations:.3f} s per iteration")
        ratio("faster than faiss (target: 1)", theirs, ours)
        print(f"  -> objective over faiss's: {float(ours.answer.objective) / theirs.answer:.4f} (target: at most 1.01)")


def everything(device: str, rounds: int) -> None:
    print(f"every metric of section 7 ({len(SECTION_7)} of them), one space, from embeddings to results")
    points, labels = stanford_online_products(device)
    measure(Space(points[:2000], labels[:2000]), SECTION_7)  # the first use of a device loads its libraries
    for _ in range(rounds):
        clock = Clock(device)
        clock(lambda: measure(Space(points, labels), SECTION_7))
        clock.line("all together (target on an H200: under 3 s)")
    print("  " + ", ".join(f"{text} {value:.4f}" for text, value in clock.answer.items()))
    space = Space(points, labels)
    for text in SECTION_7:
        clock = Clock(device)
        space.expect(1000)
        clock(lambda text=text: measure(space, [text]))
        if clock.wall > 0.02 or clock.peak > 2**28:
            clock.line(text)


def million(device: str, rounds: int) -> None:
    print("one million gallery vectors, 10,000 queries: R@{1, 10, 100}")
    generator = torch.Generator(device).manual_seed(0)
    classes = torch.randint(0, 100_000, (1_010_000,), generator=generator, device=device)
    points = torch.randn(100_000, DIM, generator=generator, device=device)[classes]
    points.add_(torch.randn(len(points), DIM, generator=generator, device=device), alpha=1.5)
    query = torch.arange(len(points), device=device) < 10_000
    for _ in range(rounds):
        clock = Clock(device)
        clock(lambda: measure(Space(points, classes, query, ~query), ["recall(k=1)", "recall(k=10)", "recall(k=100)"]))
        clock.line(f"vectors of {points.numel() * 4 / 2**20:.0f} MiB", " ".join(f"{value:.4f}" for value in clock.answer.values()))


SUBJECTS = {"retrieval": retrieval, "neighbors": neighbors, "clustering": clustering, "everything": everything, "million": million}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--peer-path", action="append", default=[], help="folder with other libraries")
    options = parser.parse_args()
    sys.path.extend(options.peer_path)
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {options.device}, {name}; {IMAGES} x {DIM}, {CLASSES} classes")
    for subject in options.only:
        SUBJECTS[subject](options.device, options.rounds)


if __name__ == "__main__":
    main()
