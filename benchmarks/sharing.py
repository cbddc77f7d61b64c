"""Whether programs that share a GPU compute the same as one program alone.

    python benchmarks/sharing.py                              # six programs at a time, 24 in all, next to two that train
    python benchmarks/sharing.py --mps --low                  # with NVIDIA MPS, below the priority of those that train
    python benchmarks/sharing.py --network "timm(name='resnet50')"

One program embeds images alone, several times. Then several programs do the same at once. Every tensor on the way, from the weights and the
pixels to the output of each block, is reduced to a checksum per image, and compared with that of the program alone. A number above zero is
a wrong result: rounding does not count. The first line with one names the step that fails. Faults were seen soon after the start of a
program, so programs are short, and start while others are at work.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _alone import run_alone
from _pack import made_up_pack, smooth

BATCH = 256


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number per row, computed where the tensor is."""
    return tensor.float().flatten(1).abs().sum(1, dtype=torch.float64)


def embed(pack: str, network: str, device: str, images: int, rounds: int) -> dict[str, np.ndarray]:
    """Embed images in each way, and return the checksums of every step."""
    from unimetric.config import RunConfig
    from unimetric.images.loading import View, open_pictures
    from unimetric.runs.device import open_fabric
    from unimetric.runs.model import build_backbone
    from unimetric.spec import create
    from unimetric.training.capture import compiled_model

    config = RunConfig(backbone=network, device=device)
    fabric = open_fabric(config)
    backbone: Any = build_backbone(config).requires_grad_(False).to(fabric.device).eval()
    loader: Any = open_pictures(
        create("datasets", f"pack(path={pack!r})"), device=fabric.device, mean=backbone.mean, std=backbone.std, compiled=device == "cuda"
    )
    view = View(create("transforms", config.transform))
    requests = [(np.arange(begin, begin + BATCH), view) for begin in range(0, images, BATCH)] * rounds
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _given, output: found.setdefault(name, []).append(checksum(output))

    with torch.inference_mode():
        found["weights"] = [checksum(tensor.reshape(1, -1)) for tensor in backbone.state_dict().values()]
        found["pixels"] = [checksum(loader.pixels[None])]
        ways = {"eager": backbone, "eager, rounded crops": backbone, "compiled": compiled_model(backbone, graphs=device == "cuda")}
        for way, model in ways.items():
            with ExitStack() as held:
                if way != "compiled":
                    for name, part in backbone.named_modules():
                        if name.rpartition(".")[2].isdigit():
                            held.callback(part.register_forward_hook(keep(f"{way}: {name}")).remove)
                if way == "eager, rounded crops":
                    held.enter_context(fabric.autocast())
                for crops in loader.load(requests):
                    found.setdefault(f"{way}: crops", []).append(checksum(crops))
                    with fabric.autocast():
                        found.setdefault(f"{way}: features", []).append(checksum(model(crops)))
        # Some programs run ahead of the GPU by many batches. Nothing before this line waits for it.
        return {name: torch.cat(parts).cpu().numpy() for name, parts in found.items()}


def train_until(stop: Any, device: str) -> None:
    """Train a convolutional network on random numbers, as the other programs on the GPU do."""
    layers = [torch.nn.Conv2d(256, 256, 3, padding=1, dtype=torch.bfloat16, device=device) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    images = torch.randn(112 if device == "cuda" else 2, 256, 28, 28, dtype=torch.bfloat16, device=device)
    while not stop.is_set():
        for _ in range(10):
            model(images).square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()


def wrong(alone: np.ndarray, found: np.ndarray) -> int:
    """Return how many checksums differ by more than rounding."""
    return int((~(np.abs(found - alone) <= 0.02 * alone)).sum())  # NaN counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="timm(name='vit_small_patch14_dinov2', image_size=224)")
    parser.add_argument("--programs", type=int, default=6, help="programs at a time")
    parser.add_argument("--starts", type=int, default=24, help="programs in all")
    parser.add_argument("--training", type=int, default=2, help="programs that train at the same time")
    parser.add_argument("--images", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mps", action="store_true", help="start NVIDIA MPS")
    parser.add_argument("--low", action="store_true", help="give the programs that embed a low priority")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        pack = str(Path(folder) / "images.pack")
        made_up_pack(Path(pack), smooth(256, 341), count=options.images)
        work = (pack, options.network, device, options.images, options.rounds)
        alone = run_alone(embed, *work)
        if options.mps:
            os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
            held.callback(subprocess.run, ["nvidia-cuda-mps-control"], input=b"quit\n")
        spawn = multiprocessing.get_context("spawn")
        stop = spawn.Event()
        others = [spawn.Process(target=train_until, args=(stop, device)) for _ in range(options.training)]
        for other in others:
            other.start()
        if options.low:
            os.environ["CUDA_MPS_CLIENT_PRIORITY"] = "1"
        failed = 0
        try:
            with ProcessPoolExecutor(options.programs, mp_context=spawn, max_tasks_per_child=1) as pool:
                programs = [pool.submit(embed, *work) for _ in range(options.starts)]
                for number, program in enumerate(as_completed(programs), 1):
                    found = program.result()
                    faults = {name: count for name, expected in alone.items() if (count := wrong(expected, found[name]))}
                    failed += bool(faults)
                    print(f"program {number}: {'wrong' if faults else 'right'}", flush=True)
                    for name, count in faults.items():
                        print(f"{name:>40}  {count:,} of {len(alone[name]):,} checksums are wrong", flush=True)
        finally:
            stop.set()  # a program that is killed at work would disturb the others under MPS
            for other in others:
                other.join()
    print(f"{failed} of {options.starts} programs were wrong")


if __name__ == "__main__":
    main()
