"""Speed of a training run relative to the bare network, and time per part of a step.

    python benchmarks/step.py                 # on the GPU if there is one, otherwise on the CPU
    python benchmarks/step.py --compile       # both compiled
    python benchmarks/step.py --only ResNet   # settings whose name contains this word

The bare step is forward, backward and optimizer on one batch that is already on the device. The run is `unimetric.training.loop`: it
draws batches, crops and augments images of a pack, mines, and updates the weights. Both alternate in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _pack import made_up_pack, noise
from _timing import milliseconds, synchronize

from unimetric.config import load
from unimetric.images.loading import View
from unimetric.objectives import Output
from unimetric.runs.device import open_fabric
from unimetric.runs.display import Display
from unimetric.training.loop import train
from unimetric.training.state import build_training_state

GPU = {
    "ResNet-50, batch 112": dict(backbone="timm(name='resnet50', frozen_batchnorm=True)", batch_size=112, sampler="samples_per_class(n=2)"),
    "ViT-S/16, batch 720": dict(backbone="timm(name='vit_small_patch16_224')", batch_size=720, sampler="samples_per_class(n=4)"),
    "MiT-B2 + CRT, batch 80": dict(
        backbone="mit(name='b2')", head="crt", objective="crt", loss="multi_similarity", batch_size=80, sampler="samples_per_class(n=5)"
    ),
}
CPU = {"small network, batch 112": dict(backbone="small", transform="glyphs", batch_size=112)}


def median_milliseconds(function, device: torch.device, repeats: int) -> float:
    for _ in range(3):
        function()
    synchronize(device)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def back_to_back(function, device: torch.device, repeats: int) -> float:
    """Return milliseconds per call after a warm-up."""
    for _ in range(5):
        function()
    return milliseconds(function, device, repeats)


def measure(name: str, settings: dict, folder: Path, *, rounds: int, steps: int, compile: bool) -> dict[str, float]:
    config = load(
        dataset=f"pack(path='{folder / 'made_up.pack'}')",
        optimizer="adam(lr=1e-5, weight_decay=4e-4)",
        logger="none",
        evaluate_every=0,
        checkpoint_every=1000,
        compile=compile,
        **settings,
    )
    fabric = open_fabric(config)
    with Display(quiet=True) as display:
        stage = build_training_state(config, fabric, display)
    device, batch = fabric.device, config.batch_size
    rows = stage.sampler.batch(0)
    look = View(stage.recipe, epoch=0)
    images = next(stage.loader.load([(stage.split.train[rows], look)]))
    labels = torch.from_numpy(stage.labels[rows]).to(device)
    stage.model.train()

    def bare() -> None:
        embeddings = stage.model(images)[0]
        stage.optimizer.zero_grad()
        fabric.backward(embeddings.square().mean())
        stage.optimizer.step()

    fixed = torch.randn(batch, stage.bare.dim, device=device, requires_grad=True)
    similarity = torch.nn.functional.normalize(fixed.detach()) @ torch.nn.functional.normalize(fixed.detach()).T
    from unimetric.geometry import match

    pairs = match(labels, dim=stage.bare.dim)
    parts = {"data": lambda: next(stage.loader.load([(stage.split.train[rows], look)]))}
    if config.objective == "plain":
        parts["loss with mining"] = lambda: stage.objective(Output(fixed, fixed[:, None], images), labels)["loss"].backward()
        parts["mining"] = lambda: stage.objective.loss.miner(similarity, pairs)
    epochs = max(2, -(-steps // len(stage.sampler)) + 1)
    bare_times, run_times = [], []
    for round_ in range(rounds):  # alternate, because the speed of the machine changes
        bare_times.append(back_to_back(bare, device, steps))
        run = load(**{**config.__dict__, "epochs": epochs, "seed": round_})
        train(run, folder / f"{name}{round_}", quiet=True)
        lines = [json.loads(line) for line in (folder / f"{name}{round_}" / "metrics.jsonl").read_text().splitlines()]
        run_times += [1000 * line["seconds"] / len(stage.sampler) for line in lines[1:]]
    bare_ms, run_ms = statistics.median(bare_times), statistics.median(run_times)
    shares = {part: median_milliseconds(function, device, 20) for part, function in parts.items()}
    print(f"\n{name} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}" + (", compiled" if compile else ""))
    print(f"  bare step       {bare_ms:8.2f} ms  {1000 * batch / bare_ms:8,.0f} images/s   (rounds: {[round(t, 2) for t in bare_times]})")
    print(f"  end to end      {run_ms:8.2f} ms  {1000 * batch / run_ms:8,.0f} images/s   ratio {bare_ms / run_ms:.3f}")
    for part, value in shares.items():
        print(f"  {part:<15} {value:8.2f} ms  {100 * value / run_ms:5.1f} % of a step, if nothing overlapped")
    return {"bare_ms": bare_ms, "run_ms": run_ms, "ratio": bare_ms / run_ms, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="word in the names of the settings to measure")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        height, width = (375, 500) if cuda else (32, 32)
        made_up_pack(Path(folder) / "made_up.pack", noise(height, width), count=4000 if cuda else 2000)
        for name, settings in (GPU if cuda else CPU).items():
            if options.only in name:
                results[name] = measure(name, settings, Path(folder), rounds=options.rounds, steps=options.steps, compile=options.compile)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
