"""Losses compared with pytorch-metric-learning.

Measures the time of forward plus backward, the extra memory, and the synchronizations with the GPU.

    python benchmarks/losses.py                        # CPU, 2 threads: batches of 112, 720 and 4,096
    python benchmarks/losses.py --device cuda          # also counts copies from the device, which must be 0
    python benchmarks/losses.py --compile              # compiles Unimetric only: the other library has data-dependent shapes
    python benchmarks/losses.py --batches 112 --only margin,triplet

Both libraries alternate in one process, at least five turns each, and the medians are compared. The JSON file also has the best turns and
the processor time of all threads, which other programs disturb less (`cpu` below is the ratio of its medians). A turn lasts at least 50 ms,
so that a short step does not include the wake-up of idle threads; `--turn 0` times single steps. Each case runs in a separate process, so
that a library that runs out of memory or time does not end the benchmark. If pytorch-metric-learning is not installed, `--peer-path` names
its folder. Without it, Unimetric is timed alone.

The matrix products of each case are timed as well. Every loss that compares a batch needs them, so they bound the ratio that any code can
reach on this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _machine import Stolen, processor
from _timing import milliseconds

from unimetric.geometry import Triplets, compare
from unimetric.spec import create, find, names
from unimetric.training.capture import compiled

DIM = 128
PER_CLASS = {112: 2, 720: 4, 4096: 4}  # Roth et al. 2020, PUMA, and a size that other libraries cannot run
MIB = 2**20

#: Loss and miner, and a function that builds the nearest loss and miner of pytorch-metric-learning. A loss without an equivalent there is
#: timed alone. NPairsLoss of that library uses one pair per class and its AngularLoss has no N-pair term, so the full losses are compared
#: with a combination of its losses: see `every_anchor`.
PEERS: dict[tuple[str, str], Callable[[Any, Any, Any, int], tuple[Any, Any]] | None] = {
    ("contrastive(active_only=True)", "all"): lambda losses, m, d, c: (losses.ContrastiveLoss(), None),
    ("contrastive", "distance_weighted"): lambda losses, m, d, c: (losses.ContrastiveLoss(), m.DistanceWeightedMiner()),
    ("triplet(squared=False, active_only=True)", "all"): lambda losses, m, d, c: (losses.TripletMarginLoss(margin=0.2), None),
    ("triplet", "distance_weighted"): lambda losses, m, d, c: (losses.TripletMarginLoss(margin=0.2), m.DistanceWeightedMiner()),
    ("triplet", "semihard"): lambda losses, m, d, c: (losses.TripletMarginLoss(margin=0.2), m.TripletMarginMiner(0.2, "semihard")),
    ("triplet", "hardest"): lambda losses, m, d, c: (losses.TripletMarginLoss(margin=0.2), m.BatchHardMiner()),
    ("margin", "all"): lambda losses, m, d, c: (losses.MarginLoss(learn_beta=True, num_classes=c), None),
    ("margin", "distance_weighted"): lambda losses, m, d, c: (losses.MarginLoss(learn_beta=True, num_classes=c), m.DistanceWeightedMiner()),
    ("margin", "rho"): None,
    ("multi_similarity(beta=50.0)", "all"): lambda losses, m, d, c: (losses.MultiSimilarityLoss(), None),
    ("multi_similarity(beta=50.0)", "multi_similarity"): lambda losses, m, d, c: (losses.MultiSimilarityLoss(), m.MultiSimilarityMiner()),
    ("snr", "distance_weighted"): lambda losses, m, d, c: (
        losses.TripletMarginLoss(margin=0.2, distance=d.SNRDistance()),
        m.DistanceWeightedMiner(),
    ),
    ("generalized_lifted", ""): lambda losses, m, d, c: (losses.GeneralizedLiftedStructureLoss(), None),
    ("n_pair", ""): lambda losses, m, d, c: (every_anchor(losses, d), one_positive),
    ("angular", ""): lambda losses, m, d, c: (
        losses.MultipleLosses([every_anchor(losses, d), losses.AngularLoss(alpha=45)], weights=[1, 2]),
        one_positive,
    ),
    # Comparison with its NPairsLoss and AngularLoss, which compute less: one pair per class, or no N-pair term.
    ("n_pair(nu=0.0)", ""): lambda losses, m, d, c: (losses.NPairsLoss(), None),
    ("angular(nu=0.0)", ""): lambda losses, m, d, c: (losses.AngularLoss(alpha=45), None),
    ("histogram", ""): lambda losses, m, d, c: (losses.HistogramLoss(n_bins=64), None),
    ("quadruplet", "distance_weighted"): None,
    ("sup_con", ""): lambda losses, m, d, c: (losses.SupConLoss(temperature=0.1), None),
    ("nt_xent", ""): lambda losses, m, d, c: (losses.NTXentLoss(temperature=0.1), None),
    ("circle", ""): lambda losses, m, d, c: (losses.CircleLoss(m=0.4, gamma=80), None),
    ("smooth_ap", ""): lambda losses, m, d, c: (losses.SmoothAPLoss(temperature=0.01), None),
    ("hyperbolic", ""): None,
    ("arcface(fallback=True)", ""): lambda losses, m, d, c: (losses.ArcFaceLoss(c, DIM, margin=math.degrees(0.5), scale=16), None),
    ("cosface", ""): lambda losses, m, d, c: (losses.CosFaceLoss(c, DIM), None),
    ("curricularface", ""): None,
    ("normalized_softmax", ""): lambda losses, m, d, c: (losses.NormalizedSoftmaxLoss(c, DIM), None),
    ("proxy_nca", ""): lambda losses, m, d, c: (losses.ProxyNCALoss(c, DIM, softmax_scale=9), None),
    ("proxy_nca_pp", ""): lambda losses, m, d, c: (losses.ProxyNCALoss(c, DIM, softmax_scale=9), None),
    ("proxy_anchor", ""): lambda losses, m, d, c: (losses.ProxyAnchorLoss(c, DIM), None),
    ("soft_triple", ""): lambda losses, m, d, c: (losses.SoftTripleLoss(c, DIM, centers_per_class=2, la=8), None),
}

#: Comparisons with losses that compute less. The means over equivalent losses exclude them.
UNLIKE = ("n_pair(nu=0.0)", "angular(nu=0.0)")


def every_anchor(losses: Any, distances: Any) -> Any:
    """Return the N-pair loss over every anchor and all negatives, with a penalty on the norm."""
    from pytorch_metric_learning.regularizers import LpRegularizer

    raw = distances.DotProductSimilarity(normalize_embeddings=False)
    return losses.NTXentLoss(temperature=1, distance=raw, embedding_regularizer=LpRegularizer(), embedding_reg_weight=0.005)


def one_positive(embeddings: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return one positive and all negatives per anchor, as in `n_pair` and `angular`."""
    same = labels[:, None] == labels
    anchor, negative = (~same).nonzero(as_tuple=True)
    return torch.arange(len(labels), device=labels.device), same.fill_diagonal_(False).int().argmax(1), anchor, negative


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments.add_argument("--batches", default="112,720,4096", help="batch sizes, separated by commas")
    arguments.add_argument("--only", default="", help="losses, separated by commas")
    arguments.add_argument("--compile", action="store_true", help="compile the losses of Unimetric")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=1.0, help="seconds per case")
    arguments.add_argument("--turn", type=float, default=50.0, help="minimum milliseconds per turn")
    arguments.add_argument("--limit", type=float, default=60.0, help="time limit of one step of the other library, in seconds")
    arguments.add_argument("--gib", type=float, default=8.0, help="memory limit of the other library on a CPU, in GiB")
    arguments.add_argument("--peer-path", default="", help="folder with pytorch_metric_learning")
    arguments.add_argument("--json", default="", help="JSON file for the results")
    options = arguments.parse_args()
    if options.peer_path:
        sys.path.insert(0, options.peer_path)
    try:
        import pytorch_metric_learning
        from pytorch_metric_learning import distances, losses, miners  # noqa: F401  its dependencies must be installed

        peer = f"pytorch-metric-learning {pytorch_metric_learning.__version__}"
    except ImportError as error:
        peer = ""
        print(f"no pytorch-metric-learning ({error}): only Unimetric is timed (see --peer-path)\n")
    wanted = [name for name in options.only.split(",") if name]
    known = {text.split("(")[0] for text, _ in PEERS}
    every = [*PEERS, *((name, "") for name in names("losses") if name not in known)]  # a new loss is timed alone
    cases = [case for case in every if not wanted or case[0].split("(")[0] in wanted]
    how = "unimetric compiled, " if options.compile else "not compiled, "
    print(f"torch {torch.__version__}, {peer or 'no peer'}, {how}{options.device}, {options.threads} threads, dimension {DIM}")
    print(f"{processor()}\n")
    stolen = Stolen()
    if options.compile and options.device == "cpu":
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()  # inductor tests the vector instructions, which can take 20 seconds: do it once, before the processes start
    rows = []
    for batch in map(int, options.batches.split(",")):
        rows += table(cases, batch, bool(peer), options)
    if options.device == "cuda":
        count_miners_apart(options)
    print(stolen)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def table(cases: list[tuple[str, str]], batch: int, peer: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    per_class = PER_CLASS.get(batch, 4)
    print(f"batch {batch}, {per_class} per class, {classes_of(batch)} classes; ms forward plus backward, additional MiB")
    copies = "  copies from device" if options.device == "cuda" else ""
    print(f"{'loss':<44}{'miner':<20}{'unimetric':>10}{'PML':>14}{'ratio':>9}{'cpu':>7}{'MiB':>10}{'MiB PML':>14}{copies}")
    rows: list[dict[str, Any]] = []
    for case, row in measure(cases, batch, peer, options):
        row |= {"loss": case[0], "miner": case[1], "batch": batch, "device": options.device}
        rows.append(row)
        theirs = row.get("theirs")
        ratio = f"{theirs / row['ours']:.1f}" if isinstance(theirs, float) and "ours" in row else ""
        stopped = row.get("stopped", "")
        if stopped.startswith("over"):
            ratio = f"> {options.limit * 1000 / row['ours']:.0f}" if "ours" in row else ""
        elif stopped:
            ratio = ""
        line = f"{case[0]:<44}{case[1]:<20}{number(row.get('ours')):>10}{stopped or number(theirs):>14}{ratio:>9}"
        cpu = f"{row['theirs_cpu'] / row['ours_cpu']:.1f}" if row.get("ours_cpu") and row.get("theirs_cpu") else ""
        line += f"{cpu:>7}{number(row.get('ours_mib')):>10}{number(row.get('theirs_mib')):>14}"
        print(line + (f"  {row.get('ours_copies', '?')} / {row.get('theirs_copies', '?')}" if copies else ""), flush=True)
    summary(rows, options.limit)
    return rows


def summary(rows: list[dict[str, Any]], limit: float) -> None:
    """Print the mean ratios.

    A step that was stopped counts with the time limit, so the mean is a lower bound. Cases that ran out of memory are excluded.
    """
    both = []
    for row in rows:
        stopped = row.get("stopped", "")
        theirs = limit * 1000 if stopped.startswith("over") else None if stopped else row.get("theirs")
        if theirs and "ours" in row:
            both.append((theirs / row["ours"], row))
    failed = sum(row.get("stopped") == "out of memory" for row in rows)
    if failed:
        print(f"pytorch-metric-learning ran out of memory {failed} times; excluded below")
    equal = [item for item in both if item[1]["loss"] not in UNLIKE]
    tuples = [item for item in equal if family(item[1]["loss"]) != "proxy"]
    for title, kept in (("all", both), ("equivalent losses", equal), ("equivalent pair and tuple losses", tuples)):
        if kept:
            ratio, slowest = min(kept, key=lambda item: item[0])
            mean = statistics.geometric_mean(ratio for ratio, _ in kept)
            cut = sum("stopped" in row for _, row in kept)
            least = f"at least {mean:.1f} ({cut} stopped at {limit:.0f} s)" if cut else f"{mean:.1f}"
            worst = f"{slowest['loss']} {slowest['miner']}".strip()
            print(f"{title}: geometric mean of {len(kept)} ratios {least}; least {ratio:.2f} ({worst})")
            bound = statistics.geometric_mean(ratio * row["ours"] / row["floor"] for ratio, row in kept)
            floor = statistics.median(row["floor"] for _, row in kept)
            print(f"    the matrix products alone take {number(floor)} ms (median), so no code can exceed a ratio of {bound:.1f}")
    most = [row for row in rows if "ours_mib" in row]
    if most:
        top = max(most, key=lambda row: row["ours_mib"])
        print(f"largest extra memory of unimetric {top['ours_mib']:.0f} MiB ({top['loss']})")
    counted = [row["ours_copies"] for row in rows if "ours_copies" in row]
    if counted:
        print(f"copies from the device in the losses of unimetric: {sum(counted)}")
    print()


def family(text: str) -> str:
    return find("losses", text.split("(")[0]).family


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def classes_of(batch: int) -> int:
    return max(100, batch // PER_CLASS.get(batch, 4))


def measure(cases: list[tuple[str, str]], batch: int, peer: bool, options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Yield each case and its results.

    A worker that crashes or exceeds its time is killed, and a new one continues with the next case.
    """
    context = multiprocessing.get_context("fork")  # fork requires that this process does not use the device
    waiting = list(cases)
    while waiting:
        listen, speak = context.Pipe(duplex=False)
        # On a CPU, memory is limited per process, so each case has its own. On a GPU, the cases share one, because its start is slow.
        share = waiting[:1] if options.device == "cpu" else list(waiting)  # a copy, because `waiting` shrinks in the loop
        worker = context.Process(target=work, args=(share, batch, peer, options, speak))
        worker.start()
        speak.close()
        for case in share:
            row: dict[str, Any] = {}
            waiting.pop(0)
            alive = True
            while alive:
                # First compilation, then the first step of the other library, then both alternate.
                patience = 300 if "ours" not in row else options.limit + 5 if "theirs" not in row else 3 * options.limit
                if not listen.poll(patience):
                    row["stopped"] = f"over {options.limit:.0f} s"
                    alive = False
                    break
                try:
                    message = listen.recv()
                except EOFError:
                    row["stopped"] = row.get("stopped", "out of memory")
                    alive = False
                    break
                if message is None:
                    break
                row |= message
            yield case, row
            if not alive:
                break
        worker.kill()
        worker.join()


def work(cases: list[tuple[str, str]], batch: int, peer: bool, options: argparse.Namespace, speak: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # hide messages of the profiler about missing GPUs; errors go to stdout
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    labels = (torch.arange(batch) // PER_CLASS.get(batch, 4)).to(device)
    embeddings = torch.randn(batch, DIM, device=device, requires_grad=True)
    small = torch.randn(8, DIM, device=device, requires_grad=True)
    for case in cases:
        try:
            one_case(case, embeddings, labels, small, peer, options, speak)
        except Exception as error:
            known = isinstance(error, MemoryError) or "memory" in str(error).lower()
            if not known:
                traceback.print_exc(file=sys.stdout)
            speak.send({"stopped": "out of memory" if known else "failed"})
        speak.send(None)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def one_case(case: tuple[str, str], embeddings: Any, labels: Any, small: Any, peer: bool, options: argparse.Namespace, speak: Any) -> None:
    device, (text, miner) = embeddings.device, case
    classes = classes_of(len(labels))
    loss = create("losses", text, miner=miner or None, num_classes=classes, dim=DIM).to(device)

    minimize = compiled(loss, device) if options.compile else loss  # as a run does

    def ours(z: torch.Tensor, y: torch.Tensor) -> None:
        z.grad = None
        loss.zero_grad()  # as in training: gradients of a CUDA graph must not accumulate
        minimize(z, y).backward()

    steps = [("ours", ours)]
    build = PEERS.get(case)
    if peer and build is not None:
        from pytorch_metric_learning import distances as d
        from pytorch_metric_learning import losses as their_losses
        from pytorch_metric_learning import miners as m

        their_loss, their_miner = build(their_losses, m, d, classes)
        their_loss = their_loss.to(device)

        def theirs(z: torch.Tensor, y: torch.Tensor) -> None:
            z.grad = None
            their_loss.zero_grad()
            their_loss(z, y, their_miner(z, y) if their_miner else None).backward()

        steps.append(("theirs", theirs))
    once: dict[str, float] = {}
    for name, step in steps:
        shape = (embeddings, labels) if options.compile and name == "ours" else (small, labels[:8])  # compiled for one shape
        step(*shape)
        peak(step, *shape)  # load libraries, fill memory pools and start the profiler before counting
        if name == "theirs" and device.type == "cpu":
            room = int(options.gib * 2**30) + virtual_memory()
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        extra, seconds = peak(step, embeddings, labels)
        if name == "ours":
            seconds = statistics.median(timed(step, embeddings, labels) for _ in range(5))
            bare = bare_products(loss, classes, embeddings)
            speak.send({"floor": statistics.median(timed(bare, embeddings) for _ in range(20)) * 1000})
        once[name] = seconds
        if name == "theirs" and seconds > options.limit:
            speak.send({"stopped": f"over {options.limit:.0f} s"})
            return
        # Send each result at once, because the next step may crash.
        speak.send({name: seconds * 1000, f"{name}_mib": extra / MIB})
        if device.type == "cuda":
            speak.send({f"{name}_copies": copies_from_device(lambda step=step: step(embeddings, labels))})
    turns: dict[str, list[float]] = {name: [] for name, _ in steps}
    counts = {name: max(1, round(options.turn / 1000 / seconds)) for name, seconds in once.items()}
    rounds = max(5, min(200, int(options.seconds / max(sum(counts[name] * once[name] for name in once), 1e-6))))
    if sum(once.values()) > 10:
        rounds = 1  # one more than the first
    cpu: dict[str, list[float]] = {name: [] for name, _ in steps}
    for _ in range(rounds):
        for name, step in steps:
            before = time.process_time()
            turns[name].append(timed(step, embeddings, labels, count=counts[name]))
            cpu[name].append((time.process_time() - before) / counts[name])
    for kind, values in (("", turns), ("_cpu", cpu)):
        speak.send({f"{name}{kind}": statistics.median(each) * 1000 for name, each in values.items()})
        speak.send({f"{name}{kind}_best": min(each) * 1000 for name, each in values.items()})


def bare_products(loss: torch.nn.Module, classes: int, embeddings: torch.Tensor) -> Callable[..., None]:
    """Return a step of the matrix products only: similarities and their gradient."""
    z = embeddings.detach()
    w = torch.randn(classes, DIM, device=z.device) if loss.family == "proxy" else z
    slope = torch.randn(len(z), len(w), device=z.device)
    # The gradient of drawn triplets needs no matrix product.
    drawn = getattr(getattr(loss, "miner", None), "gives", None) is Triplets

    def step(*_: torch.Tensor) -> None:
        torch.mm(z, w.T)
        if not drawn:
            torch.mm(slope, w)
        if w is not z:
            torch.mm(slope.T, z)

    return step


def timed(step: Callable[..., None], *inputs: torch.Tensor, count: int = 1) -> float:
    """Return the seconds per step, as the mean of consecutive steps."""
    return milliseconds(partial(step, *inputs), inputs[0].device, count) / 1000


def peak(step: Callable[..., None], *inputs: torch.Tensor) -> tuple[float, float]:
    """Return the additional bytes and the seconds of one step."""
    gc.collect()
    if inputs[0].device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = timed(step, *inputs)
        return torch.cuda.max_memory_allocated() - before, seconds
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(*inputs)
    seconds = time.perf_counter() - start
    # Count allocations of tensors, because the allocator does not return freed memory to the system.
    held = highest = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest, seconds


def virtual_memory() -> int:
    """Return the address space of this process in bytes (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    return int(line.split()[1]) * 1024


def copies_from_device(step: Callable[[], None]) -> int:
    """Count the synchronizations with the GPU: copies, scalars and data-dependent shapes."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    waits = ("Memcpy DtoH", "aten::_local_scalar_dense", "aten::nonzero")
    return sum(event.name.startswith(waits) for event in profile.events())


def count_miners_apart(options: argparse.Namespace) -> None:
    """Count the copies from the device in the miners, in a separate process."""
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=count_miners, args=(options,))
    worker.start()
    worker.join()


def count_miners(options: argparse.Namespace) -> None:
    labels = (torch.arange(112) // 2).to(options.device)
    similarity, pairs = compare(torch.randn(112, DIM, device=options.device), labels)
    print("copies from the device in the miners, at batch 112:")
    for name in names("miners"):
        miner = create("miners", name).to(options.device)
        print(f"  {name:<20}{copies_from_device(lambda miner=miner: miner(similarity, pairs))}", flush=True)


if __name__ == "__main__":
    main()
