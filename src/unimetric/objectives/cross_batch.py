"""Cross-batch memory: compare the batch with embeddings of earlier steps."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Natural, NonNegative
from unimetric.errors import UnimetricError
from unimetric.geometry import Memory
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class CrossBatch(Objective):
    """Cross-batch memory (XBM): compare the batch with embeddings of earlier steps.

        L = loss(batch, batch) + weight * loss(batch, memory)

    The memory is a ring buffer of the last `size` embeddings, without gradient, starting with the
    batch itself. A sample is not compared with its copy. For the first `start` steps, the loss uses
    only the batch, and the memory stays empty.

    `memory_only=True` is the form of pytorch-metric-learning used by PUMA: L = loss(batch, memory),
    from the first step on.

    Reference:
        Cross-batch memory for embedding learning (Wang et al., CVPR 2020).

    Args:
        loss: Spec string of a loss over pairs or tuples.
        miner: Miner spec string. Defaults to the loss's miner.
        size: Number of embeddings in the memory. The paper uses 55,000 for Stanford Online
            Products, PUMA 4,096.
        weight: Weight of the term with the memory.
        start: Number of steps before the memory is used. `None` is 2,000, or 0 with `memory_only`.
        memory_only: Whether to omit the term of the batch.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
        batch_size: Number of images per step, which the memory must hold. Provided by the run.
    """

    embeddings: Tensor
    labels: Tensor
    state: Tensor

    def __init__(
        self,
        *,
        loss: str = "contrastive",
        miner: str | None = None,
        size: Count = 8192,
        weight: NonNegative = 1.0,
        start: Natural | None = None,
        memory_only: bool = False,
        num_classes: Count,
        dim: Count,
        batch_size: Count = 1,
    ) -> None:
        super().__init__()
        _check_room(size, batch_size)
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        if self.loss.family == "proxy":
            raise UnimetricError(
                f"the objective `cross_batch` requires a loss over pairs or tuples, but the loss `{loss}` compares with proxies",
                'use a loss over pairs or tuples, such as `loss = "multi_similarity"`, or set `objective = "plain"`',
            )
        self.size, self.weight, self.memory_only = size, weight, memory_only
        if start is None:
            start = 0 if memory_only else 2000
        self.start = start
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("state", torch.zeros(3, dtype=torch.int64))  # steps taken, slot of the next batch, filled slots

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        memory, started = self._enqueue(output.embeddings.detach(), labels)
        with_memory = self.loss(output.embeddings, labels, memory)
        if self.memory_only and self.start == 0:
            return {"loss": with_memory}
        alone = self.loss(output.embeddings, labels)
        # Selected by arithmetic, because branching on the step would synchronize with the device.
        if self.memory_only:
            return {"loss": torch.where(started, with_memory, alone)}
        return {"loss": alone, "memory": torch.where(started, self.weight * with_memory, 0)}

    @torch.no_grad()
    def _enqueue(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"]) -> tuple[Memory, Tensor]:
        """Write the batch into the ring buffer.

        Returns the content of the buffer, and whether the memory is in use.
        """
        batch = len(labels)
        _check_room(self.size, batch)
        steps, slot, filled = self.state.clone()
        started = steps >= self.start
        slots = torch.arange(self.size, device=labels.device)
        own = (slot + slots[:batch]) % self.size
        self.embeddings.index_copy_(0, own, embeddings.to(self.embeddings.dtype))
        self.labels.index_copy_(0, own, labels.to(self.labels.dtype))
        # Before the start, the slot does not move, and each batch overwrites the last.
        grown = torch.where(started, batch, 0)
        filled = (filled + grown).clamp_max(self.size)
        self.state.copy_(torch.stack([steps + 1, (slot + grown) % self.size, filled]))
        valid = slots < filled
        # Return a copy, because the next step may write into the ring buffer before the backward pass of
        # this step has read it.
        return Memory(self.embeddings.clone(), self.labels.clone(), valid, own), started


def _check_room(size: int, batch: int) -> None:
    if batch > size:
        raise UnimetricError(
            f"`size` must be at least the batch size of {batch}, got a memory of {size}",
            f"use `cross_batch(size={batch})` or more, or lower `batch_size`",
        )
