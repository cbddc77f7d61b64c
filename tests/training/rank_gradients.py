"""Program of `test_ranks.py`: two steps of each kind of method on several ranks, then the gradients as files.

The kind `resumed` takes two steps from a checkpoint that was written with two ranks. The ranks are forks of this
process: one import of PyTorch takes longer than all steps of a rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import timm  # noqa: F401  (imported once, before the ranks are forked)
import torch
from lightning_fabric import Fabric
from safetensors.torch import save_file

from unimetric.config import RunConfig, load
from unimetric.geometry.shards import join, shard_of
from unimetric.runs.display import Display
from unimetric.spec import create
from unimetric.training.batches import batches
from unimetric.training.checkpoint import resume, save_checkpoint
from unimetric.training.loop import take_step
from unimetric.training.progress import Progress
from unimetric.training.state import TrainingState, build_training_state, embed_rows


def two_steps(state: TrainingState) -> torch.Tensor:
    """Take two steps, and return the loss of the second."""
    state.begin_epoch(0)
    for _, (step, batch) in zip(range(2), batches(state, 0), strict=False):
        loss, _ = take_step(state, batch, step / state.steps)
    return loss


def whole(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values of a parameter, with the rows of all ranks if they are divided."""
    shard = shard_of(parameter)
    return values.contiguous() if shard is None else join(values, shard.total)


def gradients(fabric: Fabric, config: RunConfig, checkpoint: Path | None) -> dict[str, torch.Tensor]:
    """Take two steps, and return loss and gradients of the second, and the embeddings of two images, fewer than three ranks."""
    state = build_training_state(config, fabric, Display(quiet=True))
    if checkpoint:
        if fabric.world_size == 2:
            two_steps(state)
            save_checkpoint(state, checkpoint, Progress())
        assert resume(state, checkpoint).resumed
    loss = two_steps(state)
    parts = {"model": state.bare, "objective": state.objective}
    named = [(f"{part}.{name}", each) for part, module in parts.items() for name, each in module.named_parameters()]
    found = {name: whole(each, each.grad) for name, each in named if each.grad is not None}
    if checkpoint:
        found |= {f"{name} itself": whole(each, each.detach()) for name, each in named}
    return found | {"loss": loss, "embeddings": embed_rows(state, np.arange(2))}


def sharded_losses() -> dict[str, torch.Tensor]:
    """Gradients of embeddings and class directions in double precision, without a run."""
    found: dict[str, torch.Tensor] = {}
    for name in (
        "arcface",
        "cosface",
        "curricularface",
        "curricularface(per_class_t=True)",
        "normalized_softmax",
        "arcface(negatives=0.5)",
    ):
        torch.manual_seed(0)
        spec = f"{name.rstrip(')')}{', ' if '(' in name else '('}sharded=True)"
        loss = create("losses", spec, num_classes=61, dim=6, batch_size=8).double()
        embeddings = torch.randn(8, 6, dtype=torch.float64).requires_grad_()
        value = loss(embeddings, torch.tensor([0, 60, 25, 25, 31, 11, 40, 0]))
        value.backward()
        found |= {f"{name} loss": value.detach(), f"{name} embeddings": embeddings.grad}
        found[f"{name} proxies"] = whole(loss.proxies, loss.proxies.grad)
    return found


def run_rank(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Compute all gradients as one of several ranks, and write them if it is the first."""
    torch.set_num_threads(1)
    if ranks > 1:  # what the launcher of Fabric sets for the processes that it starts
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    assert (fabric.world_size, fabric.global_rank) == (ranks, rank)
    kinds = json.loads((folder / "kinds.json").read_text())
    results = {"sharded losses": sharded_losses()}
    for kind, settings in kinds.items():
        checkpoint = folder / kind if kind == "resumed" else None
        if checkpoint and fabric.global_rank == 0:
            checkpoint.mkdir(exist_ok=True)
        results[kind] = gradients(fabric, load(**settings), checkpoint)
    for kind, found in results.items() if fabric.global_rank == 0 else ():
        save_file(found, folder / f"{ranks} {kind}.safetensors")


def find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


if __name__ == "__main__":
    for count in map(int, sys.argv[2:]):
        torch.multiprocessing.start_processes(
            run_rank, args=(count, find_free_port(), Path(sys.argv[1])), nprocs=count, start_method="fork"
        )
