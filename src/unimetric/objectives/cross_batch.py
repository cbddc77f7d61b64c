"""Cross-batch memory: the batch is compared with embeddings of the steps before."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory
from unimetric.objectives import Output
from unimetric.spec import create


class CrossBatch(nn.Module):
    """Cross-batch memory for embedding learning, XBM (Wang et al., CVPR 2020).

        L = loss(batch, batch) + weight * loss(batch, memory)

    where the memory is a ring of the last `size` embeddings, without gradient, the batch itself first among them; a sample is not
    compared with its own copy. For the first `start` steps the loss is on the batch alone and the memory stays empty.

    `memory_only=True` is the form of pytorch-metric-learning that PUMA uses: L = loss(batch, memory), from the first step on.

    Args:
        loss: a part of `losses/` over pairs or tuples.
        miner: a part of `miners/`; the loss's own where none is named.
        size: how many embeddings the memory holds; 55,000 for Stanford Online Products in the paper, 4,096 in PUMA.
        weight: of the memory's term.
        start: steps before the memory is used; `None` is 2,000, or 0 with `memory_only`.
        memory_only: leave the batch's own term out.
        num_classes: training classes.
        dim: embedding dimension.
        batch_size: pictures a step, which the memory must hold; a run gives it.
    """

    embeddings: Tensor
    labels: Tensor
    state: Tensor

    def __init__(
        self,
        *,
        loss: str = "contrastive",
        miner: str | None = None,
        size: int = 8192,
        weight: float = 1.0,
        start: int | None = None,
        memory_only: bool = False,
        num_classes: int,
        dim: int,
        batch_size: int = 1,
    ) -> None:
        super().__init__()
        _check_room(size, batch_size)
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        if getattr(self.loss, "family", "") == "proxy":
            raise UnimetricError(
                f"the objective `cross_batch` keeps embeddings to compare with, but the loss `{loss}` compares with proxies",
                'name a loss over pairs or tuples, such as `loss = "multi_similarity"`, or set `objective = "plain"`',
            )
        self.size, self.weight, self.memory_only = size, weight, memory_only
        self.start = (0 if memory_only else 2000) if start is None else start
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("state", torch.zeros(3, dtype=torch.int64))  # steps taken, where the next batch goes, how much is filled

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        memory, started = self._enqueue(output.embeddings.detach(), labels)
        with_memory = self.loss(output.embeddings, labels, memory)
        if self.memory_only and self.start == 0:
            return {"loss": with_memory}
        alone = self.loss(output.embeddings, labels)
        # Chosen by arithmetic: to branch on the step would make the host wait for the device.
        if self.memory_only:
            return {"loss": torch.where(started, with_memory, alone)}
        return {"loss": alone, "memory": torch.where(started, self.weight * with_memory, 0)}

    @torch.no_grad()
    def _enqueue(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"]) -> tuple[Memory, Tensor]:
        """Put the batch into the ring; what is there now, and whether the memory is in use."""
        batch = len(labels)
        _check_room(self.size, batch)
        steps, place, filled = self.state.clone()
        started = steps >= self.start
        slots = torch.arange(self.size, device=labels.device)
        own = (place + slots[:batch]) % self.size
        self.embeddings.index_copy_(0, own, embeddings.to(self.embeddings.dtype))
        self.labels.index_copy_(0, own, labels.to(self.labels.dtype))
        # Before the start the place does not move, and each batch overwrites the last.
        grown = torch.where(started, batch, 0)
        filled = (filled + grown).clamp_max(self.size)
        self.state.copy_(torch.stack([steps + 1, (place + grown) % self.size, filled]))
        valid = slots < filled
        # A copy of the ring: the next step writes into it, perhaps before this one's backward pass has read it.
        return Memory(self.embeddings.clone(), self.labels.clone(), valid, own), started


def _check_room(size: int, batch: int) -> None:
    if batch > size:
        raise UnimetricError(
            f"a batch of {batch} does not fit into a memory of {size}", f"write `cross_batch(size={batch})` or more, or lower `batch_size`"
        )
