"""Gather the outputs of all ranks, so that each computes the loss of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from unimetric.kinds import Output
from unimetric.runs.device import Fabric
from unimetric.runs.display import Display


def gather(fabric: Fabric, output: Output, reads: tuple[str, ...]) -> Output:
    """Join the outputs of all ranks, in rank order and with gradient.

    Args:
        fabric: Fabric of the run.
        output: Output of this rank's slice of the batch.
        reads: Which of "tokens" and "images" the objective uses. Embeddings and branches are always
            gathered; anything else stays this rank's slice.
    """
    if fabric.world_size == 1:
        return output

    def join(tensor: Tensor, gradient: bool = True) -> Tensor:
        ranks: Any = fabric.all_gather(tensor, sync_grads=gradient)
        return ranks.flatten(0, 1)

    embeddings = join(output.embeddings)
    tokens, images, views = output.tokens, output.images, output.views
    if "tokens" in reads:
        tokens = join(tokens)
    if "images" in reads:
        images = join(images, False)
        views = tuple(join(view, False) for view in views)
    branches = (embeddings,) if len(output.branches) == 1 else tuple(map(join, output.branches))
    return Output(embeddings, tokens, images, branches, views)


def warn_of_batch_norm(fabric: Fabric, model: nn.Module, display: Display) -> None:
    """Print a line if batch statistics depend on the number of ranks.

    Each rank normalizes its slice of the batch.

    Args:
        fabric: Fabric of the run.
        model: Model of the run.
        display: Output.
    """
    model.train()  # a backbone may fix its statistics, which no number of ranks changes
    layers = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training]
    if fabric.world_size > 1 and not all(isinstance(each, nn.SyncBatchNorm) for each in layers):
        display.line(
            f"{len(layers)} BatchNorm layers normalize the slice of each of the {fabric.world_size} devices on its own: "
            "the result differs from a run on one device"
        )
