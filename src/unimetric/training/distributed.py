"""Over several devices every rank sees the whole batch: the same loss, and the same proxies, everywhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unimetric.objectives import Output
from unimetric.runs.device import Fabric


def gathered(fabric: Fabric, output: Output, reads: tuple[str, ...]) -> Output:
    """The output of all ranks' shares of a batch, in rank order, with gradient.

    Args:
        fabric: of the run.
        output: of this rank's pictures.
        reads: which of "tokens" and "images" the objective uses beside embeddings and branches; the others stay this rank's own.
    """
    if fabric.world_size == 1:
        return output

    def whole(tensor: Tensor, gradient: bool = True) -> Tensor:
        every: Any = fabric.all_gather(tensor, sync_grads=gradient)
        return every.flatten(0, 1)

    embeddings = whole(output.embeddings)
    pictures = "images" in reads
    return Output(
        embeddings,
        whole(output.tokens) if "tokens" in reads else output.tokens,
        whole(output.images, False) if pictures else output.images,
        (embeddings,) if len(output.branches) == 1 else tuple(map(whole, output.branches)),
        tuple(whole(view, False) for view in output.views) if pictures else output.views,
    )
