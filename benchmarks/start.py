"""Seconds from the command to the end of the first training step.

    python benchmarks/start.py                # ResNet-50 on the GPU if there is one, otherwise a small network on the CPU
    python benchmarks/start.py --compile

The images are a pack of JPEG files. The first turn has empty caches, so that it decodes the pack and compiles; the others find a decoded
copy and compiled graphs. Each turn is a process of its own. `import` lasts from the start of the process to the loop, `build` reads the
images and builds the model, `evaluate` measures the untrained model.
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


def made_up_photos(path: Path, *, pictures: int) -> None:
    """Write a pack of smooth random images as JPEG files."""
    import numpy as np
    import torch

    from unimetric.images import packing
    from unimetric.images.table import Table

    classes = pictures // 20
    labels = np.arange(pictures) % classes
    names = tuple(f"c{number}" for number in range(classes))
    table = Table(tuple(map(str, range(pictures))), labels, names, train=labels >= classes // 5, source_names=("made up",))
    coarse = torch.rand(16, 3, 40, 50, generator=torch.Generator().manual_seed(0))
    fine = torch.nn.functional.interpolate(coarse, (256, 340), mode="bicubic").clamp(0, 1).mul(255).byte().permute(0, 2, 3, 1)
    packing.write(path, table, short_side=None, quality=90, read=lambda name: fine[int(name) % 16].numpy())


def turn(arguments: list[str]) -> None:
    """Train until the first step has ended, and print the time of each part."""
    from unimetric.training import loop

    times = {"import": time.time() - float(os.environ["BEGUN"])}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            begun = time.time()
            result = function(*values)
            if name == "first step":
                result[0].item()  # waits for the device
            times[name] = time.time() - begun
            if name == "first step":
                times["all"] = time.time() - float(os.environ["BEGUN"])
                print(json.dumps(times), flush=True)
                os._exit(0)
            return result

        return call

    loop.build_training_state = timed("build", loop.build_training_state)
    loop.log_starting_point = timed("evaluate", loop.log_starting_point)
    loop.take_step = timed("first step", loop.take_step)
    from unimetric.cli import main

    sys.argv = ["unimetric", "train", *arguments]
    main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--pictures", type=int, help="images of the pack; 4,000 on a GPU, 800 on a CPU")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'cpu'}{', compiled' if options.compile else ''}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made_up_photos(folder / "photos.pack", pictures=options.pictures or (4000 if cuda else 800))
        pack = f"dataset=pack(path='{folder / 'photos.pack'}')"
        caches = {"UNIMETRIC_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        for number in range(options.turns):
            command = [*SETTINGS[cuda], pack, f"compile={str(options.compile).lower()}", "--out", str(folder / f"run{number}")]
            environment = os.environ | caches | {"BEGUN": str(time.time())}
            done = subprocess.run([sys.executable, __file__, "--turn", *command], env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            times = json.loads(done.stdout.splitlines()[-1])
            print(f"  turn {number + 1}:  " + "  ".join(f"{part} {seconds:.1f} s" for part, seconds in times.items()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        turn(sys.argv[2:])
    else:
        main()
