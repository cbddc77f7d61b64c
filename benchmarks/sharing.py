"""Whether programs that share a GPU compute the same as one program alone.

    python benchmarks/sharing.py                              # six programs at a time, 24 in all, next to two that train
    python benchmarks/sharing.py --mps --low                  # with NVIDIA MPS, below the priority of those that train
    python benchmarks/sharing.py --network "timm(name='resnet50')"
    python benchmarks/sharing.py --cold                       # every program compiles for itself, and tunes its kernels on the busy GPU
    python benchmarks/sharing.py --set CUDA_LAUNCH_BLOCKING=1 # no kernel is launched before the last one has ended
    python benchmarks/sharing.py --set DISABLE_ADDMM_CUDA_LT=1 --attention math

One program embeds images alone, several times, and fine-tunes with a rate of zero, so that all passes over a batch are equal. Then several
programs do the same at once. Every tensor on the way, from the weights and the pixels to the output of each layer and the gradients, is
reduced to checksums per image, and compared with those of the program alone. A number above zero is a wrong result: rounding does not
count. The first line with one names the step that fails; the places are those of images in their order, or of steps. Weights, pixels and
memory that no kernel touches are compared once more at the end: if they are wrong, memory has changed, and not a computation. Faults were
seen soon after the start of a program, so programs are short, and start while others are at work.
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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _alone import run_alone
from _pack import made_up_pack, smooth

BATCH = 256

#: Layers of a transformer whose outputs are compared: blocks, by their numbers, and these.
LAYERS = ("qkv", "attn", "proj", "fc1", "fc2")


@cache
def signs(count: int, device: torch.device) -> torch.Tensor:
    return (torch.randint(2, (count,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1).to(device)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return nine numbers per row, computed where the tensor is: sums of eight parts with random signs, and their usual size.

    A plain sum is nearly the same for all outputs of a LayerNorm.
    """
    rows = tensor.float().flatten(1)
    parts = torch.nn.functional.pad(rows * signs(rows.shape[1], rows.device), (0, -rows.shape[1] % 8)).unflatten(1, (8, -1))
    return torch.cat([parts.sum(2, dtype=torch.float64), rows.norm(dim=1, keepdim=True).double() / 8**0.5], 1)


def count_all_blocks(network: torch.nn.Module) -> None:
    """Draw a transformer whose output depends on each block.

    Without pretrained weights, timm scales blocks of DINOv2 by 1e-5, and attention is nearly a mean: a wrong block would change nothing.
    """
    for name, parameter in network.named_parameters():
        if name.endswith(".gamma"):
            torch.nn.init.ones_(parameter)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=(2 if ".qkv." in name else 1) / parameter.shape[1] ** 0.5)


def fine_tune(fabric: Any, network: Any, batches: list[torch.Tensor], keep: Callable[[str, torch.Tensor], None]) -> None:
    """Train a compiled network with a rate of zero, and keep the loss and the gradient of each step."""
    from unimetric.training.capture import compiled_model

    network.train().requires_grad_(True)
    model = compiled_model(network, graphs=fabric.device.type == "cuda")
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0, fused=True)
    for images in batches:
        with fabric.autocast():
            summary = model(images)[:, 0].float()
        loss = (summary @ torch.linspace(-1, 1, summary.shape[1], device=summary.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        keep("training: loss", loss.detach().reshape(1, 1))
        gradients = [parameter.grad.abs().sum() for parameter in parameters if parameter.grad is not None]
        keep("training: gradients", torch.stack(gradients)[None])
        optimizer.step()


def embed(pack: str, network: str, device: str, images: int, rounds: int, steps: int, attention: str, cold: bool) -> dict[str, np.ndarray]:
    """Embed images in each way, fine-tune, and return the checksums of every step."""
    if cold:
        folder = tempfile.mkdtemp(dir=Path(pack).parent)
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
    from unimetric.config import RunConfig
    from unimetric.images.loading import View, open_pictures
    from unimetric.runs.device import open_fabric
    from unimetric.runs.model import build_backbone
    from unimetric.spec import create
    from unimetric.training.capture import compiled_model

    config = RunConfig(backbone=network, device=device)
    fabric = open_fabric(config)
    for way in ("flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{way}_sdp")(attention in ("any", way))
    memory = torch.ones(1024, 2**18 if device == "cuda" else 1, device=device)  # 1 GiB that no kernel touches
    backbone: Any = build_backbone(config).requires_grad_(False)
    if "weights=" not in network:
        count_all_blocks(backbone)
    backbone = backbone.to(fabric.device).eval()
    loader: Any = open_pictures(
        create("datasets", f"pack(path={pack!r})"), device=fabric.device, mean=backbone.mean, std=backbone.std, compiled=device == "cuda"
    )
    view = View(create("transforms", config.transform))
    requests = [(np.arange(begin, begin + BATCH), view) for begin in range(0, images, BATCH)] * rounds
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        found.setdefault(name, []).append(checksum(tensor))

    def keep_state(when: str) -> None:
        for tensor in backbone.state_dict().values():
            keep(f"weights {when}", tensor.reshape(1, -1))
        keep(f"pixels {when}", loader.pixels.view(images, -1))
        keep(f"untouched memory {when}", memory)

    with torch.inference_mode():
        keep_state("before")
        ways = {way: backbone for way in ("eager", "eager, rounded crops", "eager, layer by layer")}
        ways["compiled"] = compiled_model(backbone, graphs=device == "cuda")
        for way, model in ways.items():
            with ExitStack() as held:
                if way == "eager, layer by layer":
                    for name, part in backbone.named_modules():
                        if name.rpartition(".")[2].isdigit() or name.endswith(LAYERS):
                            hook = part.register_forward_hook(lambda _part, _given, out, name=name: keep(f"layer {name}", out))  # type: ignore[misc]
                            held.callback(hook.remove)
                if way == "eager, rounded crops":
                    held.enter_context(fabric.autocast())
                for crops in loader.load(requests):
                    keep(f"{way}: crops", crops)
                    with fabric.autocast():
                        keep(f"{way}: features", model(crops))
    if steps:
        batch = next(iter(loader.load([(np.arange(min(images, 112)), view)])))
        fine_tune(fabric, backbone, [batch] * steps, keep)
    with torch.inference_mode():
        keep_state("after")
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


def wrong(alone: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the rows whose checksums differ by more than rounding."""
    return (~(np.abs(found - alone).max(1) <= 0.1 * alone[:, -1])).nonzero()[0]  # NaN counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="timm(name='vit_small_patch14_dinov2', image_size=224)")
    parser.add_argument("--programs", type=int, default=6, help="programs at a time")
    parser.add_argument("--starts", type=int, default=24, help="programs in all")
    parser.add_argument("--training", type=int, default=2, help="programs that train at the same time")
    parser.add_argument("--images", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of fine-tuning")
    parser.add_argument("--attention", choices=("any", "flash", "mem_efficient", "math"), default="any")
    parser.add_argument("--cold", action="store_true", help="keep no compiled code")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment of the programs that are compared")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA MPS")
    parser.add_argument("--low", action="store_true", help="give the programs that embed a low priority")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        pack = str(Path(folder) / "images.pack")
        made_up_pack(Path(pack), smooth(256, 341), count=options.images)
        work = (pack, options.network, device, options.images, options.rounds, options.steps, options.attention, options.cold)
        switches = dict(each.split("=", 1) for each in options.set)
        os.environ |= switches
        alone = run_alone(embed, *work)
        for name in switches:
            del os.environ[name]
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
        os.environ |= switches
        failed = 0
        try:
            with ProcessPoolExecutor(options.programs, mp_context=spawn, max_tasks_per_child=1) as pool:
                programs = [pool.submit(embed, *work) for _ in range(options.starts)]
                for number, program in enumerate(as_completed(programs), 1):
                    found = program.result()
                    faults = {name: places for name, expected in alone.items() if len(places := wrong(expected, found[name]))}
                    failed += bool(faults)
                    print(f"program {number}: {'wrong' if faults else 'right'}", flush=True)
                    for name, places in faults.items():
                        print(f"{name:>40}  {len(places):,} of {len(alone[name]):,} are wrong: {places[0]} to {places[-1]}", flush=True)
        finally:
            stop.set()  # a program that is killed at work would disturb the others under MPS
            for other in others:
                other.join()
    print(f"{failed} of {options.starts} programs were wrong")


if __name__ == "__main__":
    main()
