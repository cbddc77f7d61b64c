"""Step time and peak memory of each objective, relative to the plain one.

    python benchmarks/objectives.py --device cuda --network resnet50             # batch 112, bf16, channels last
    python benchmarks/objectives.py --device cuda --network resnet50 --compile
    python benchmarks/objectives.py --device cpu --network small --rounds 3 --steps 5
    python benchmarks/objectives.py --device cuda --network vit_small --batch 256 --only plain  # the memory that the next one should need
    python benchmarks/objectives.py --device cuda --network vit_small --batch 4096 --only cached

A step is `take_step` of `unimetric.training.loop`, on crops of random images in memory. All objectives alternate in one process. The
ratio is the median over rounds of the ratio within each round. The targets: S2SD 1.10, Uniform Prior 1.05, DiVA 2.30 (a second view, and
a copy of the network).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _pack import made_up_pack, noise
from _timing import milliseconds

from unimetric.config import load
from unimetric.runs.device import open_fabric
from unimetric.runs.display import Display
from unimetric.training.batches import batches
from unimetric.training.loop import take_step
from unimetric.training.state import TrainingState, build_training_state

NETWORKS: dict[str, dict[str, Any]] = {
    "resnet50": {"backbone": "timm(name='resnet50', frozen_batchnorm=True)", "transform": "base"},
    "small": {"backbone": "small", "transform": "glyphs"},
    "vit_small": {"backbone": "timm(name='vit_small_patch16_224')", "transform": "base"},
}
SIZES = {"resnet50": (375, 500), "small": (32, 32), "vit_small": (256, 256)}
#: Name, objective, head, and the largest step time as a multiple of the plain one.
OBJECTIVES = (
    ("plain", "plain", "linear(dim=128)", 1.0),
    ("s2sd, four branches", "s2sd(delay=0)", "linear(dim=128)", 1.10),
    ("s2sd of ooDML", "s2sd(dims=(1024, 1536, 2048), pool_aggr=True, delay=0)", "linear(dim=128)", 1.10),
    ("uniform_prior", "uniform_prior", "linear(dim=128)", 1.05),
    ("mixup", "mixup", "linear(dim=128)", None),
    ("diva", "diva", "diva(dim=128)", 2.30),
    ("cached", "cached(chunk=256)", "linear(dim=128)", None),
)
MIB = 2**20


def training(state: TrainingState) -> Iterator[torch.Tensor]:
    """Yield the loss of one step of the training loop after another."""
    for epoch in itertools.count():
        state.begin_epoch(epoch)
        for _, batch in batches(state, epoch):
            yield take_step(state, batch, 0.0)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", choices=tuple(NETWORKS), default="resnet50")
    parser.add_argument("--batch", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="steps per round")
    parser.add_argument("--compile", action="store_true", help="compile model and objective")
    parser.add_argument("--only", default="", help="prefixes of names, separated by commas; ratios need `plain`")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    wanted = tuple(options.only.split(","))
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    runs: dict[str, Iterator[torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder, Display(quiet=True) as display:
        path = Path(folder) / "made_up.pack"
        height, width = SIZES[options.network]
        made_up_pack(path, noise(height, width), count=max(1400, options.batch * 5 // 4 // 20 * 20))
        device = torch.device(options.device)
        for name, objective, head, _ in OBJECTIVES:
            if not name.startswith(wanted):
                continue
            config = load(
                dataset=f"pack(path='{path}')",
                objective=objective,
                head=head,
                loss="margin",
                miner="distance_weighted",
                batch_size=options.batch,
                device=options.device,
                compile=options.compile,
                residence="device" if cuda else "host",
                logger="none",
                **NETWORKS[options.network],
            )
            fabric = open_fabric(config)
            before = torch.cuda.memory_allocated() if cuda else 0
            runs[name] = training(state := build_training_state(config, fabric, display))
            milliseconds(partial(next, runs[name]), device, 5)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                milliseconds(partial(next, runs[name]), device, 10)
                pixels = getattr(state.loader, "pixels", None)
                own = pixels.numel() * pixels.element_size() if isinstance(pixels, torch.Tensor) else 0
                memory[name] = (torch.cuda.max_memory_allocated() - before - own) / MIB
        for _ in range(options.rounds):  # alternate, because the speed of the machine changes
            for name, steps in runs.items():
                times.setdefault(name, []).append(milliseconds(partial(next, steps), device, options.steps))

    where = torch.cuda.get_device_name() if cuda else "cpu"
    print(f"{options.network}, batch {options.batch}, {where}" + (", compiled" if options.compile else ""))
    print(f"{'objective':<22}{'ms/step':>10}{'ratio':>8}{'rounds from .. to':>20}{'allowed':>9}{'peak MiB':>10}{'ratio':>8}")
    results = {}
    for name, _, _, allowed in OBJECTIVES:
        if name not in times:
            continue
        ratios = [mine / plain for mine, plain in zip(times[name], times.get("plain", times[name]), strict=True)]
        ratio, span = statistics.median(ratios), f"{min(ratios):.3f} .. {max(ratios):.3f}"
        held = f"{memory[name]:10,.0f}{memory[name] / memory.get('plain', memory[name]):8.3f}" if memory else f"{'-':>10}{'-':>8}"
        bound = f"{allowed:.2f}" if allowed else "-"
        print(f"{name:<22}{statistics.median(times[name]):10.2f}{ratio:8.3f}{span:>20}{bound:>9}{held}")
        results[name] = {"ms": statistics.median(times[name]), "ratio": ratio, "ratios": ratios, "peak_mib": memory.get(name)}
    if options.out:
        options.out.write_text(json.dumps({"machine": where, "compile": options.compile, "results": results}, indent=1))


if __name__ == "__main__":
    main()
