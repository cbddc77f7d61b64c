"""Class directions of a loss: a random sample, and their division among ranks."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import CounterRNG
from unimetric.geometry.shards import divide, hold, max_ranks, share, sum_ranks


class Classes(nn.Module):
    """The class directions that a training step uses: those of the batch, and others.

    Their number is fixed, so shapes are static. Without training, all are used. If they are divided among ranks, each
    rank uses a sample of its own.

    Reference:
        Partial FC: training 10 million identities on a single machine (An et al., ICCVW 2021).

    Args:
        number: Number of classes.
        fraction: Fraction of the classes. If the batch has more, it is the size of the batch. 1 uses all.
        sharded: Whether each rank of a run holds the directions of a part of the classes.
    """

    def __init__(self, number: int, *, fraction: float, sharded: bool) -> None:
        super().__init__()
        self.number, self.fraction, self.shard = number, fraction, divide(number) if sharded else None
        if fraction < 1:  # a loss without a sample has no further state
            self.dice = CounterRNG(4)  # a different sequence from those of other components

    def draw_directions(self, dim: int) -> nn.Parameter:
        """Draw the directions of all classes, and return those of this rank, to be trained."""
        return hold(torch.empty(self.number, dim).uniform_(-1, 1) / math.sqrt(dim), self.shard)

    def choose(
        self, embeddings: Float[Tensor, "B D"], proxies: Float[Tensor, "C D"], labels: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "S D"], Int[Tensor, "B"]]:
        """Return embeddings, the directions to compare them with, and the rows of the labels.

        A label whose direction another rank holds has the row -1.
        """
        if self.shard is None and (self.fraction == 1 or not self.training):
            return embeddings, proxies, labels
        rows, total, start = labels, len(proxies), 0
        if self.shard is not None:
            embeddings, total, start = share(embeddings), self.shard.total, self.shard.start
            rows = torch.where((labels >= start) & (labels < self.shard.stop), labels - start, -1)
        size = max(len(labels), math.ceil(self.fraction * len(proxies)))
        if not self.training or size >= len(proxies):
            return embeddings, proxies, rows
        keys = self.dice(total).to(labels.device)[start : start + len(proxies)]  # the numbers of other classes are below 1
        keys = F.pad(keys, (1, 0)).index_fill(0, rows + 1, 2.0)[1:]  # the labels of other ranks fill the padding
        chosen = keys.topk(size, sorted=False).indices.sort().values
        places = torch.searchsorted(chosen, rows)
        return embeddings, proxies.index_select(0, chosen), places if self.shard is None else torch.where(rows < 0, -1, places)

    def target(self, values: Float[Tensor, "B S"], rows: Int[Tensor, "B"]) -> Float[Tensor, "B 1"]:
        """Return the value of each label, from whichever rank holds its direction."""
        if self.shard is None:
            return values.gather(1, rows[:, None])
        return sum_ranks(torch.where(rows[:, None] < 0, 0.0, values.gather(1, rows[:, None].clamp_min(0))))

    def with_target(self, values: Float[Tensor, "B S"], rows: Int[Tensor, "B"], target: Float[Tensor, "B 1"]) -> Float[Tensor, "B S"]:
        """Return values with those of the labels replaced."""
        column = rows[:, None]
        if self.shard is None:
            return values.scatter(1, column, target)
        place = column.clamp_min(0)
        return values.scatter(1, place, torch.where(column < 0, values.gather(1, place), target))

    def cross_entropy(self, logits: Float[Tensor, "B S"], rows: Int[Tensor, "B"]) -> Float[Tensor, ""]:
        """Return the mean cross entropy over the classes of all ranks.

        Args:
            logits: Logits of the directions of this rank.
            rows: Row of each label among them, or -1.
        """
        if self.shard is None:
            return F.cross_entropy(logits, rows)
        target = self.target(logits, rows)
        peak = max_ranks(logits.amax(1, keepdim=True))
        parts = (logits - peak).exp().sum(1, keepdim=True)
        return (sum_ranks(parts).log() + peak - target).mean()
