"""Seconds from the command to the end of the first training step.

    python benchmarks/start.py                # ResNet-50 on the GPU if there is one, otherwise a small network on the CPU
    python benchmarks/start.py --compile

The images are a pack of JPEG files. The first turn has empty caches, so that it decodes the pack and compiles; the others find a decoded
copy and compiled graphs. Each turn is a process of its own. `import` lasts from the start of the process to the loop, `build` reads the
images and builds the model, `evaluate` measures the untrained model. The bare turn imports torch and timm and trains a ResNet on one batch
of random numbers, without compiling: no program starts faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS = {
    True: ["cub200_margin", "backbone=timm(name='resnet50', frozen_batchnorm=True)", "device=cuda"],
    False: ["glyphs_margin", "transform=base(size=64, resize=72)", "device=cpu"],
}


def turn(arguments: list[str]) -> None:
    """Train until the first step has ended, and print the time of each part."""
    from unimetric.cli.imports import importing

    with importing():  # as `train` does
        from unimetric.training import loop

    times = {"import": time.time() - float(os.environ["BEGUN"])}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            begun = time.time()
            result = function(*values)
            if name != "first step":
                times[name] = time.time() - begun
                return result
            result[0].item()  # waits for the device
            times.update({name: time.time() - begun, "all": time.time() - float(os.environ["BEGUN"])})
            print(json.dumps(times), flush=True)
            os._exit(0)

        return call

    loop.build_training_state = timed("build", loop.build_training_state)
    loop.log_starting_point = timed("evaluate", loop.log_starting_point)
    loop.take_step = timed("first step", loop.take_step)
    from unimetric.cli import main

    sys.argv = ["unimetric", "train", *arguments]
    main()


def bare() -> None:
    """Take one step with as little code as possible, and print its time."""
    import timm
    import torch

    cuda = torch.cuda.is_available()
    device, name, shape = ("cuda", "resnet50", (112, 3, 224, 224)) if cuda else ("cpu", "resnet18", (16, 3, 64, 64))
    times = {"import": time.time() - float(os.environ["BEGUN"])}
    model = timm.create_model(name, num_classes=128).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    with torch.autocast(device, torch.bfloat16, enabled=cuda):
        loss = model(torch.randn(shape, device=device)).float().square().mean()
    loss.backward()
    optimizer.step()
    loss.item()  # waits for the device
    print(json.dumps(times | {"all": time.time() - float(os.environ["BEGUN"])}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--images", type=int, help="images of the pack; 4,000 on a GPU, 800 on a CPU")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    import torch
    from _pack import made_up_pack, smooth

    cuda = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'cpu'}{', compiled' if options.compile else ''}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = options.images or (4000 if cuda else 800)
        made_up_pack(folder / "photos.pack", smooth(256, 340), count=count, test_classes=count // 100, encoding="jpeg")
        pack = f"dataset=pack(path='{folder / 'photos.pack'}')"
        caches = {"UNIMETRIC_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        for number in range(options.turns):
            command = [*SETTINGS[cuda], pack, f"compile={str(options.compile).lower()}", "--out", str(folder / f"run{number}")]
            print_times(f"turn {number + 1}", ["--turn", *command], caches)
        for _ in range(2):  # the first one may read files that are not in memory yet
            print_times("bare", ["--bare"], {})


def print_times(name: str, arguments: list[str], variables: dict[str, str]) -> None:
    """Run this file in a process of its own, and print the times that it reports."""
    environment = os.environ | variables | {"BEGUN": str(time.time())}
    done = subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    times = json.loads(done.stdout.splitlines()[-1])
    print(f"  {name}:  " + "  ".join(f"{part} {seconds:.1f} s" for part, seconds in times.items()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        turn(sys.argv[2:])
    elif sys.argv[1:2] == ["--bare"]:
        bare()
    else:
        main()
