"""Several ranks: each computes the loss of the whole batch, and all take the same step.

Gradients are averaged here and not by the hooks of `DistributedDataParallel`. Those wait for every parameter, so a
user would have to know whether an objective, an adapter or a warm-up leaves some of them without a gradient
(`find_unused_parameters`). Here a parameter without a gradient has none on any rank, as on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unimetric.geometry.shards import shard_of
from unimetric.kinds import Output
from unimetric.runs.device import DDPStrategy, Fabric
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


#: Numbers per all-reduce. More save little time and take more memory.
_BUCKET = 2**24


def averages_gradients(fabric: Fabric) -> bool:
    """Return whether `average_gradients` averages, instead of the strategy or a single rank."""
    return fabric.world_size > 1 and isinstance(fabric.strategy, DDPStrategy)


def local_gradients(fabric: Fabric, model: Any) -> AbstractContextManager[Any]:
    """Return a context in which each rank computes its own gradients."""
    return fabric.no_backward_sync(model) if averages_gradients(fabric) else nullcontext()


@torch.no_grad()
def average_gradients(fabric: Fabric, parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients of some parameters by their mean over the ranks.

    Args:
        fabric: Fabric of the run.
        parameters: Parameters in the same order on all ranks. Those without a gradient have none on any rank.
    """
    if not averages_gradients(fabric):
        return
    buckets: list[list[Tensor]] = []
    for gradient in (parameter.grad for parameter in parameters):
        if gradient is None:
            continue
        last = buckets[-1] if buckets else []
        if last and last[0].dtype == gradient.dtype and sum(each.numel() for each in last) + gradient.numel() <= _BUCKET:
            last.append(gradient)
        else:
            buckets.append([gradient])
    for bucket in buckets:
        joined = torch.cat([gradient.flatten() for gradient in bucket])
        torch.distributed.all_reduce(joined)
        joined /= fabric.world_size
        for gradient, mean in zip(bucket, joined.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


@torch.no_grad()
def share_first_rank(fabric: Fabric, tensors: Iterable[Tensor]) -> None:
    """Replace tensors by those of the first rank, except rows that each rank has for itself.

    Running statistics differ between ranks, and parameters of a loss may by rounding.

    Args:
        fabric: Fabric of the run.
        tensors: Tensors in the same order on all ranks.
    """
    for tensor in tensors if averages_gradients(fabric) else ():
        if shard_of(tensor) is None:
            torch.distributed.broadcast(tensor.data, 0)


@torch.no_grad()
def clip_norm(fabric: Fabric, model: Any, optimizer: Any, *, largest: float) -> None:
    """Limit the norm of the gradient, including the rows of other ranks."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    shards = [each.grad for each in parameters if shard_of(each) is not None]
    if not shards:
        # `check_finite_loss` raises a better error than the clipping.
        fabric.clip_gradients(model, optimizer, max_norm=largest, error_if_nonfinite=False)
        return
    fabric.strategy.precision.unscale_gradients(optimizer.optimizer)
    rows = torch.nn.utils.get_total_norm(shards).square()
    torch.distributed.all_reduce(rows)
    others = torch.nn.utils.get_total_norm([each.grad for each in parameters if shard_of(each) is None])
    torch.nn.utils.clip_grads_with_norm_(parameters, largest, (rows + others.square()).sqrt())


def warn_of_slices(fabric: Fabric, model: nn.Module, objective: Any, display: Display) -> None:
    """Print a line if the result depends on the number of ranks.

    With BatchNorm, each rank normalizes its slice of the batch. Some objectives, such as `mixup`, blend it.
    """
    if fabric.world_size == 1:
        return
    model.train()  # a backbone may fix its statistics, which no number of ranks changes
    layers = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training]
    causes = []
    if not all(isinstance(each, nn.SyncBatchNorm) for each in layers):
        causes.append(f"{len(layers)} BatchNorm layers normalize")
    if objective.whole_batch:
        causes.append("the objective blends")
    for cause in causes:
        devices = f"the slice of each of the {fabric.world_size} devices on its own"
        display.line(f"{cause} {devices}: the result differs from a run on one device")
