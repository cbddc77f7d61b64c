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


def turn(arguments: list[str]) -> None:
    """Train until the first step has ended, and print the time of each part."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--pictures", type=int, help="images of the pack; 4,000 on a GPU, 800 on a CPU")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    import torch
    from _pack import made_up_pack, smooth

    cuda = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'cpu'}{', compiled' if options.compile else ''}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = options.pictures or (4000 if cuda else 800)
        made_up_pack(folder / "photos.pack", smooth(256, 340), count=count, test_classes=count // 100, encoding="jpeg")
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
