"""Samplers that use embeddings, compared with a plain numpy/scipy version of each.

    python benchmarks/samplers.py                      # CPU: milliseconds, ratio, and whether both select the same rows
    python benchmarks/samplers.py --device cuda        # and the fraction of a 33 ms step (ResNet-50, batch 112),
                                                       # alone and while other work keeps the GPU busy

Both versions alternate, and the median of each is shown. `processor` is the ratio of the processor times of all threads. Times include
drawing the big batch and its candidates. The plain version then selects among the candidates of Unimetric, so that the selections can be
compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import scipy.linalg
import torch
from _timing import synchronize
from scipy.spatial.distance import pdist
from scipy.stats import wasserstein_distance

from unimetric.spec import create, names

STEP_MS = 33.0  # ResNet-50, batch 112, 224 x 224, mixed precision, on one H200


def straightforward_draw(by_class: list[np.ndarray], rng: np.random.Generator, *, batch_size: int, n: int = 2) -> None:
    """Draw a big batch and ten candidates of it, n samples per class, with one call per class."""
    classes = rng.choice(len(by_class), 1024 // n)
    big_batch = [rng.choice(by_class[number], n, replace=False) for number in classes]
    for _ in range(10):
        np.concatenate([big_batch[number] for number in rng.choice(len(big_batch), batch_size // n, replace=False)])


def straightforward_coreset(big_batch: np.ndarray, count: int) -> np.ndarray:
    chosen = [0]
    nearest = np.full(len(big_batch), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, ((big_batch - big_batch[chosen[-1]]) ** 2).sum(1))
        chosen.append(int(nearest.argmax()))
    return np.array(chosen)


def straightforward_distances(big_batch: np.ndarray, positions: np.ndarray) -> int:
    distances = pdist(big_batch)
    span = distances.min(), distances.max()
    heights, edges = np.histogram(distances, bins=50, range=span)
    middle = (edges[1:] + edges[:-1]) / 2
    cost = []
    for candidate in positions:
        own, _ = np.histogram(pdist(big_batch[candidate]), bins=50, range=span)
        cost.append(wasserstein_distance(middle, middle, own, heights))
    return int(np.argmin(cost))


def straightforward_frechet(big_batch: np.ndarray, positions: np.ndarray) -> int:
    mean, covariance = big_batch.mean(0), np.cov(big_batch, rowvar=False)
    cost = []
    for candidate in positions:
        points = big_batch[candidate]
        own = np.cov(points, rowvar=False)
        root = scipy.linalg.sqrtm(own @ covariance + 1e-8 * np.eye(len(own))).real
        cost.append(((points.mean(0) - mean) ** 2).sum() + np.trace(own + covariance - 2 * root))
    return int(np.argmin(cost))


def reference(
    name: str, sampler: object, labels: np.ndarray, embeddings: np.ndarray, batch_size: int, step: int
) -> tuple[Callable[[], object], Callable[[object], np.ndarray]]:
    """Return a function that selects a batch, and one that reads the rows from its result."""
    rng = np.random.default_rng((sampler.seed if name == "greedy_coreset" else 1, 0, step))
    if name == "greedy_coreset":
        rows = rng.choice(len(embeddings), sampler.big_batch, replace=False)
        big_batch = embeddings[rows]
        return lambda: straightforward_coreset(big_batch, sampler.centers), lambda chosen: rows[chosen]
    by_class = [np.flatnonzero(labels == number) for number in np.unique(labels)]
    rows, positions = sampler.candidates.draw(0, step)
    big_batch = embeddings[rows]
    choose = straightforward_distances if name == "distance_matching" else straightforward_frechet

    def draw_and_choose() -> int:
        straightforward_draw(by_class, rng, batch_size=batch_size)
        return choose(big_batch, positions)

    return draw_and_choose, lambda best: rows[positions[best]]


def timed(call: Callable[[], object], device: str) -> tuple[float, float, object]:
    """Return the wall time and the processor time in milliseconds, and the result."""
    synchronize(device)
    start, processor = time.perf_counter(), time.process_time()
    result = call()
    synchronize(device)  # a batch is returned at once while the next one is computed; include that time
    return (time.perf_counter() - start) * 1e3, (time.process_time() - processor) * 1e3, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=names("samplers"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=112)
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # The size of the training half of CUB200: 5,864 rows of 100 classes.
    rng = np.random.default_rng(0)
    labels = rng.integers(100, size=5864)
    points = rng.standard_normal((100, arguments.dim))[labels] + rng.standard_normal((len(labels), arguments.dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    embeddings = torch.from_numpy(points).float().to(arguments.device)

    print(
        f"batch {arguments.batch_size}, big batch 1,024, 10 candidates, {arguments.dim}-d, {arguments.device}, {arguments.threads} threads"
    )
    print(f"{'sampler':20}{'unimetric':>10}{'numpy, ms':>11}{'ratio':>8}{'processor':>11}{'same choice':>13}{'of a step':>11}")
    for name in arguments.only:
        sampler = create("samplers", name, labels=labels, batch_size=arguments.batch_size, seed=0)
        ours, theirs, our_processor, their_processor, same = [], [], [], [], 0
        if not sampler.needs_embeddings:
            cost = timed(lambda sampler=sampler: list(sampler), arguments.device)[0] / len(sampler)
            print(f"{name:20}{cost:10.3f}{'':43}{cost / STEP_MS:11.1%}")
            continue
        sampler.fill(embeddings)
        sampler.batch(len(sampler) - 1)  # warm
        sampler.fill(embeddings)
        sampler.batch(0)
        for step in range(1, min(arguments.repeats + 1, len(sampler))):
            choose, read = reference(name, sampler, labels, points, arguments.batch_size, step)
            spent, processor, rows = timed(lambda sampler=sampler, step=step: sampler.batch(step), arguments.device)
            ours.append(spent)
            our_processor.append(processor)
            spent, processor, result = timed(choose, "cpu")
            theirs.append(spent)
            their_processor.append(processor)
            rows = rows[:: sampler.n] if name == "greedy_coreset" else rows
            same += np.array_equal(rows, read(result))
        cost, other = statistics.median(ours), statistics.median(theirs)
        by_processor = statistics.median(their_processor) / statistics.median(our_processor)
        line = f"{name:20}{cost:10.3f}{other:11.1f}{other / cost:7.1f}x{by_processor:10.1f}x"
        print(line + f"{f'{same}/{len(ours)}':>13}{cost / STEP_MS:11.1%}")
        if arguments.device == "cuda":
            time_with_step(name, sampler, embeddings, arguments.batch_size)


def time_with_step(name: str, sampler: object, embeddings: torch.Tensor, batch_size: int) -> None:
    """Print the time that a sampler adds to a step of matrix products that keep the GPU busy."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def busy(products: int, choose: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in range(20):
            rows = sampler.batch(step) if choose else None
            for _ in range(products):
                torch.mm(matrix, matrix)
            if choose:
                sampler.refresh(rows, embeddings[:batch_size])
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / 20

    busy(10, False)
    products = round(10 * STEP_MS / busy(10, False))
    without, with_ = [], []
    for epoch in range(1, 8):
        without.append(busy(products, False))
        sampler.epoch = epoch
        with_.append(busy(products, True))
    plain, full = statistics.median(without), statistics.median(with_)
    print(f"{'':20}a step of {plain:.1f} ms takes {full:.1f} ms with {name}: {full / plain - 1:+.1%}")


if __name__ == "__main__":
    main()
