"""Program of each rank in `test_ranks.py`: two steps of each kind of method, then the gradients as files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from safetensors.torch import save_file

from unimetric.config import RunConfig, load
from unimetric.runs.display import Display
from unimetric.training.batches import batches
from unimetric.training.loop import take_step
from unimetric.training.state import build_training_state


def gradients(fabric: Fabric, config: RunConfig) -> dict[str, torch.Tensor]:
    """Take two steps, and return loss and gradients of the second."""
    state = build_training_state(config, fabric, Display(quiet=True))
    state.begin_epoch(0)
    for _, (step, batch) in zip(range(2), batches(state, 0), strict=False):
        loss, _ = take_step(state, batch, step / state.steps)
    parts = {"model": state.bare, "objective": state.objective}
    named = [(f"{part}.{name}", each) for part, module in parts.items() for name, each in module.named_parameters()]
    return {name: each.grad.contiguous() for name, each in named if each.grad is not None} | {"loss": loss}


def main(ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    for kind, settings in json.loads((folder / "kinds.json").read_text()).items():
        found = gradients(fabric, load(**settings))
        if fabric.global_rank == 0:
            save_file(found, folder / f"{ranks} {kind}.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
