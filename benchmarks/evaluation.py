"""Evaluation compared with other libraries, at the size of the test half of SOP.

That is 60,502 images of 11,316 classes, with 128 dimensions.

    python benchmarks/evaluation.py                    subjects for a CPU (about an hour on two cores)
    python benchmarks/evaluation.py --device cuda
    python benchmarks/evaluation.py --only retrieval neighbors --rounds 3
    python benchmarks/evaluation.py --peer-path DIR    other libraries in a separate folder

The libraries alternate, so that a busy machine slows all of them; compare the ratios. A library that cannot be imported is skipped with a
message. Each time is the best and the median of all rounds, by wall clock and as processor time of all threads (`cpu`), which other
programs disturb less. The first and last lines name the CPU and the time that the hypervisor gave to other machines: compare only runs in
which it is near zero.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import logging
import resource
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import Stolen, processor

from unimetric.geometry.kmeans import kmeans
from unimetric.geometry.nearest import nearest
from unimetric.metrics import Space, map_at_r, measure, r_precision, recall

IMAGES, CLASSES, DIM = 60_502, 11_316, 128
SECTION_7 = [
    *(f"recall(k={k})" for k in (1, 10, 100, 1000)),
    *("precision(k=10)", "r_precision", "map_at_r", "map_at_k(k=1000)", "map_at_k(k=1000, divide='class')", "mrr"),
    *("map_at_k(class_size=True, divide='class')", "nmi", "ami", "f1", "pi_intra", "pi_inter", "pi_ratio"),
    *("spectral_decay", "spectral_decay(drop_largest=0)", "class_spectra", "uniformity", "unified", "per_source", "harmonic"),
]


CALLED = (recall, map_at_r, r_precision)
PEER_NAMES = ("precision_at_1", "mean_average_precision_at_r", "r_precision")


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
    """Wall time and processor time of each turn, and the peak of the additional memory."""

    device: str
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    peak: float = 0.0
    answer: Any = field(default=None, repr=False)

    @property
    def wall(self) -> float:
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpus)

    def __call__(self, work: Callable[[], Any], *, same_turn: bool = False) -> Any:
        """Time one turn, or one more part of the same turn."""
        gc.collect()
        stop, peak = threading.Event(), [0.0]
        watch = threading.Thread(target=self._watch, args=(stop, peak))
        held = self._held(restart=True)
        watch.start()
        wall, cpu = time.perf_counter(), time.process_time()
        self.answer = work()
        if self.device != "cpu":
            torch.cuda.synchronize()
        times = (self.walls, time.perf_counter() - wall), (self.cpus, time.process_time() - cpu)
        for turns, seconds in times:
            if same_turn:
                turns[-1] += seconds
            else:
                turns.append(seconds)
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
        wall, cpu = f"{min(self.walls):7.2f} / {self.wall:.2f} s", f"{min(self.cpus):7.2f} / {self.cpu:.2f} s"
        print(f"  {name:<44} {wall}   cpu {cpu}   memory {self.peak / 2**20:7.0f} MiB   {note}", flush=True)


def peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library may fail in any way that its dependencies do
        print(f"  {name} is skipped: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def ratio(name: str, theirs: Clock, ours: Clock) -> None:
    best, median = min(theirs.cpus) / min(ours.cpus), theirs.cpu / ours.cpu
    print(
        f"  -> {name}: {theirs.wall / ours.wall:.2f}x by wall clock, {median:.2f}x by processor time (best turns {best:.2f}x)", flush=True
    )


def accuracy_calculator(points: torch.Tensor, labels: torch.Tensor) -> Callable[[], dict[str, float]] | None:
    """Return the evaluation of pytorch-metric-learning, or None without that library."""
    module = peer("pytorch_metric_learning.utils.accuracy_calculator")
    if module is None:
        return None
    calculator = module.AccuracyCalculator(include=PEER_NAMES, k="max_bin_count", device=points.device)
    return lambda: calculator.get_accuracy(points, labels)


def retrieval(device: str, rounds: int) -> None:
    print("P@1, MAP@R and R-precision: pytorch-metric-learning's AccuracyCalculator(k='max_bin_count'), and unimetric")
    points, labels = stanford_online_products(device)
    texts = ["precision(k=1)", "map_at_r", "r_precision"]
    ours, theirs, bare = Clock(device), Clock(device), Clock(device)
    other = accuracy_calculator(points, labels)
    scores = points.new_empty(1024 * IMAGES)

    def product() -> None:
        for some in points.split(1024):
            torch.mm(some, points.T, out=scores[: len(some) * IMAGES].view(len(some), IMAGES))

    for _ in range(rounds):
        ours(lambda: measure(Space(points, labels), texts))
        bare(product)
        if other is not None:
            theirs(other)
    ours.line("unimetric", " ".join(f"{value:.6f}" for value in ours.answer.values()))
    bare.line("the bare product of all pairs")
    ratio("faster than the bare product of all pairs (target on a CPU: 1.25)", bare, ours)
    if other is not None:
        theirs.line("pytorch-metric-learning", " ".join(f"{theirs.answer[name]:.6f}" for name in PEER_NAMES))
        ratio("faster than pytorch-metric-learning (target: 8)", theirs, ours)


def one_by_one(device: str, rounds: int, count: int = 20_000) -> None:
    print(f"{count} points: metrics called one after another, together, and recall@1 alone")
    points, labels = (part[:count].contiguous() for part in stanford_online_products(device))
    other = accuracy_calculator(points, labels)
    calls: dict[str, Callable[[], Any] | None] = {
        "recall(k=1) alone": lambda: recall(Space(points, labels)),
        "recall, map_at_r, r_precision of one space": lambda: [metric(space) for space in [Space(points, labels)] for metric in CALLED],
        "the same by measure": lambda: measure(Space(points, labels), ["recall(k=1)", "map_at_r", "r_precision"]),
        "pytorch-metric-learning": other,
    }
    clocks = {name: Clock(device) for name, call in calls.items() if call is not None}
    for _ in range(rounds):
        for name, clock in clocks.items():
            clock(calls[name])
    for name, clock in clocks.items():
        clock.line(name)
    if other is not None:
        for name in list(clocks)[:3]:
            ratio(f"{name}, faster than pytorch-metric-learning (target: 6)", clocks["pytorch-metric-learning"], clocks[name])


def groups(device: str, rounds: int) -> None:
    print("P@1, MAP@R and R-precision, without groups, with small groups (same class and camera) and with one of six cameras left out")
    points, labels = stanford_online_products(device)
    camera = torch.randint(0, 6, (IMAGES,), generator=torch.Generator().manual_seed(1)).to(device)
    texts = ["precision(k=1)", "map_at_r", "r_precision"]
    kinds: dict[str, dict[str, Any]] = {"none": {}, "class": {"group": camera}, "group": {"group": camera, "group_rule": "group"}}
    clocks = {kind: Clock(device) for kind in kinds}
    measure(Space(points[:2000], labels[:2000]), texts)  # the first use of a device loads its libraries
    for _ in range(rounds):
        for kind, options in kinds.items():
            clocks[kind](lambda options=options: measure(Space(points, labels, **options), texts))
    for kind, clock in clocks.items():
        clock.line(f"group rule: {kind}", " ".join(f"{value:.6f}" for value in clock.answer.values()))
    plain = clocks["none"]
    for kind in ("class", "group"):
        wall, cpu, peak = (getattr(clocks[kind], key) / getattr(plain, key) for key in ("wall", "cpu", "peak"))
        print(f"  -> {kind}: {wall:.2f} of the wall time, {cpu:.2f} of the cpu time, {peak:.2f} of the memory (at most 1.3)")


def torchreid_rank() -> Any:
    """Return the file of torchreid with its evaluation, or None without that package.

    The package itself is not imported: it needs gdown and tensorboard. Only its evaluation in Python is compared, not that in Cython.
    """
    package = importlib.util.find_spec("torchreid")
    if package is None or package.origin is None:
        print("  torchreid is skipped: it is not installed (`pip install --no-deps torchreid`, or --peer-path)")
        return None
    file = next((path for path in Path(package.origin).parent.rglob("metrics/rank.py")), None)
    spec = None if file is None else importlib.util.spec_from_file_location("torchreid_rank", file)
    if spec is None or spec.loader is None:
        print("  torchreid is skipped: it has no file metrics/rank.py")
        return None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing Cython
        spec.loader.exec_module(module)
    return module


def reidentification(device: str, rounds: int, queries: int = 1000, images: int = 11_000) -> None:
    print(f"CMC and mAP of re-identification, {queries} queries, {images - queries} gallery images, six cameras: torchreid, and unimetric")
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 750, (images,), generator=generator)
    camera = torch.randint(0, 6, (images,), generator=generator)
    points = torch.randn(750, DIM, generator=generator)[labels] + 2 * torch.randn(images, DIM, generator=generator)
    points = torch.nn.functional.normalize(points).to(device)
    query = torch.arange(images) < queries
    ours, theirs, module = Clock(device), Clock(device), torchreid_rank()
    texts = ["cmc(k=1)", "cmc(k=5)", "cmc(k=10)", "map"]

    def torchreid() -> list[float]:
        distances = (1 - points[:queries] @ points[queries:].T).cpu().numpy()
        ids, cameras = labels.numpy(), camera.numpy()
        curve, mean = module.eval_market1501(distances, ids[:queries], ids[queries:], cameras[:queries], cameras[queries:], 50)
        return [float(curve[0]), float(curve[4]), float(curve[9]), float(mean)]

    for _ in range(rounds):
        ours(lambda: list(measure(Space(points, labels, query, ~query, group=camera), texts).values()))
        if module is not None:
            theirs(torchreid)
    ours.line("unimetric", " ".join(f"{value:.6f}" for value in ours.answer))
    if module is not None:
        theirs.line("torchreid", " ".join(f"{value:.6f}" for value in theirs.answer))
        ratio("faster than torchreid", theirs, ours)
        largest = max(abs(one - two) for one, two in zip(ours.answer, theirs.answer, strict=True))
        print(f"  -> largest difference of the results: {largest:.1e} (torchreid rounds its curve to float32)")


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
            bare(lambda rows=rows: plain(rows), same_turn=start > 0)
            ours(lambda rows=rows: search(rows), same_turn=start > 0)
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
    ours.line("unimetric", f"objective {float(ours.answer.objective):.1f}, {ours.wall / iterations:.3f} s per iteration")
    if faiss is not None:
        theirs.line("faiss", f"objective {theirs.answer:.1f}, {theirs.wall / iterations:.3f} s per iteration")
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


def ten_million(device: str, rounds: int, images: int = 10_000_000, queries: int = 2000) -> None:
    print(f"P@1, MAP@R and R-precision of {queries:,} of {images:,} unit vectors among all others (target: 8 GiB with the vectors)")
    generator = torch.Generator(device).manual_seed(0)
    points = torch.empty(images, DIM, device=device)
    for some in points.split(100_000):  # classes of ten vectors around a center
        some.normal_(generator=generator)
        some.unflatten(0, (-1, 10)).add_(torch.randn(len(some) // 10, 1, DIM, generator=generator, device=device))
        some.div_(some.norm(dim=1, keepdim=True))
    query = torch.arange(images, device=device) % (images // queries) == 0
    labels = torch.arange(images, device=device) // 10
    clock = Clock(device)
    for _ in range(rounds):
        clock(lambda: measure(Space(points, labels, query), ["recall(k=1)", "map_at_r", "r_precision"]))
    clock.line(f"vectors of {points.numel() * 4 / 2**20:.0f} MiB", " ".join(f"{value:.4f}" for value in clock.answer.values()))


def million_by_million(device: str, rounds: int, images: int = 1_000_000, k: int = 10) -> None:
    print(f"{k} neighbors of each of {images:,} vectors: exact search, and the bare product of all pairs without a selection")
    generator = torch.Generator(device).manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(images, DIM, generator=generator, device=device))
    own = torch.arange(images, device=device)
    scores = points.new_empty(1 << 28)
    step = len(scores) // images
    ours, bare = Clock(device), Clock(device)

    def search() -> float:
        return float(sum(best.sum() for _, best, _ in nearest(points, points, k, own=own)))

    def product() -> None:
        for some in points.split(step):
            torch.mm(some, points.T, out=scores[: len(some) * images].view(len(some), images))

    for _ in range(rounds):
        bare(product)
        ours(search)
    ours.line("unimetric", f"mean score {ours.answer / images / k:.4f}")
    bare.line("the bare product of all pairs")
    print(f"  -> unimetric takes {ours.wall / bare.wall:.2f} of the wall time")


SUBJECTS = {
    "retrieval": retrieval,
    "one_by_one": one_by_one,
    "groups": groups,
    "reidentification": reidentification,
    "neighbors": neighbors,
    "clustering": clustering,
    "everything": everything,
    "million": million,
    "ten_million": ten_million,
    "million_by_million": million_by_million,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each library; they alternate")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SUBJECTS),
        default=list(SUBJECTS)[:-2],
        help="subjects (default: all but the last two, which need 8 GiB and a GPU)",
    )
    parser.add_argument("--peer-path", action="append", default=[], help="folder with other libraries")
    options = parser.parse_args()
    sys.path.extend(options.peer_path)
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"{torch.get_num_threads()} threads"
    stolen = Stolen()
    print(f"torch {torch.__version__}, {options.device}, {name}; {IMAGES} x {DIM}, {CLASSES} classes\n{processor()}\ntimes: best / median")
    for subject in options.only:
        SUBJECTS[subject](options.device, options.rounds)
    print(stolen)


if __name__ == "__main__":
    main()
