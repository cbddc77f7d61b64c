"""Embedding on a CPU: plain torch in float32, what Unimetric does, also in 16 bits or compiled, and onnxruntime.

    python benchmarks/embedding.py
    python benchmarks/embedding.py --networks efficientnet_lite --batch 8 --ways "plain torch" unimetric compiled

`bfloat16` and `float16` are torch's autocast. The first is measured by default only on a CPU with instructions for it, the second only if
it is named: where torch has no fast product in float16, as on Neoverse-N1, a transformer takes minutes. Plain torch has the default
memory layout and the default allocator. Unimetric stores images with channels last, and lets the C library keep freed memory. The
allocator is set for a whole process, so each way has its own one. They take turns on the same images. The table has the processor time
and the wall clock per image, of the best and the median turn, and the largest difference of a coordinate of the normalized embedding
from plain torch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from _machine import Stolen, processor

from unimetric.runs.device import keep_freed_memory
from unimetric.spec import create

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = ("plain torch", "unimetric", *HALVES, "compiled", "onnxruntime")


def images(batch: int) -> torch.Tensor:
    return torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def prepare(way: str, network: str, batch: int) -> Callable[[], np.ndarray]:
    torch.manual_seed(0)
    backbone = create("backbones", network).eval()
    given = images(batch)
    if way == "onnxruntime":
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            torch.onnx.export(backbone, (given,), path, dynamo=True, verbose=False, input_names=["images"], external_data=False)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"images": given.numpy()})[0]
    if way != "plain torch":
        keep_freed_memory()
        backbone, given = (each.to(memory_format=torch.channels_last) for each in (backbone, given))
    if way == "compiled":
        backbone = torch.compile(backbone)
    if way in HALVES:
        run = torch.autocast("cpu", dtype=HALVES[way])(backbone.forward)
        return lambda: run(given).float().numpy()
    return lambda: backbone(given).numpy()


def serve(pipe: Connection, way: str, network: str, batch: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        embed = prepare(way, network, batch)
        embed()
        while pipe.recv():
            wall, cpu = time.perf_counter(), time.process_time()
            found = embed()
            pipe.send((time.perf_counter() - wall, time.process_time() - cpu, found))


def compare(network: str, ways: list[str], *, batch: int, turns: int, threads: int) -> None:
    pipes = {}
    for way in ways:
        mine, theirs = Pipe()
        get_context("spawn").Process(target=serve, args=(theirs, way, network, batch, threads), daemon=True).start()
        pipes[way] = mine
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    found = {}
    for _ in range(turns):
        for way, pipe in pipes.items():
            pipe.send(True)
            wall, cpu, features = pipe.recv()
            times[way].append((1000 * cpu / batch, 1000 * wall / batch))
            points = features[:, 0] if features.ndim == 3 else features
            found[way] = points / np.linalg.norm(points, axis=1, keepdims=True)
    for pipe in pipes.values():
        pipe.send(False)
    print(f"\n{network}, batches of {batch}, {threads} threads: milliseconds per image")
    first = times[ways[0]]
    for way in ways:
        cpu, wall = zip(*times[way], strict=True)
        ratio = statistics.median(each[0] for each in first) / statistics.median(cpu)
        gap = float(np.abs(found[way] - found[ways[0]]).max())
        print(
            f"  {way:<12} processor {min(cpu):6.1f} best {statistics.median(cpu):6.1f} median   wall {min(wall):6.1f} best "
            f"{statistics.median(wall):6.1f} median   {ratio:5.2f} times as fast (processor, median)   difference {gap:.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--networks", nargs="+", default=["efficientnet_lite", "timm(name='resnet50')", "timm(name='vit_small_patch16_224')"]
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    hidden = ["compiled", "float16"] + ([] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["bfloat16"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if way not in hidden])
    arguments = parser.parse_args()
    print(processor())
    stolen = Stolen()
    for network in arguments.networks:
        compare(network, arguments.ways, batch=arguments.batch, turns=arguments.turns, threads=arguments.threads)
    print(stolen)


if __name__ == "__main__":
    main()
