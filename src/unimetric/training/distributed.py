"""Gather the outputs of several ranks, so that each rank computes the loss of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unimetric.kinds import Output
from unimetric.runs.device import Fabric


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
