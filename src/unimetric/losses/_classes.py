"""Random sample of the classes of a loss, for very many classes."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import CounterRNG


class ClassSample(nn.Module):
    """The class directions that a training step uses: those of the batch, and random others.

    Their number is fixed, so shapes are static. Without training, all are used.

    Reference:
        Partial FC: training 10 million identities on a single machine (An et al., ICCVW 2021).

    Args:
        fraction: Fraction of the classes. If the batch has more, it is the size of the batch. 1 uses all.
    """

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.fraction = fraction
        if fraction < 1:  # a loss without a sample has no further state
            self.dice = CounterRNG(4)  # a different sequence from those of other components

    def forward(self, proxies: Float[Tensor, "C D"], labels: Int[Tensor, "B"]) -> tuple[Float[Tensor, "S D"], Int[Tensor, "B"]]:
        """Return the sampled directions, and the rows of the labels among them."""
        size = max(len(labels), math.ceil(self.fraction * len(proxies)))
        if not self.training or size >= len(proxies):
            return proxies, labels
        keys = self.dice(len(proxies)).to(labels.device).index_fill(0, labels, 2.0)  # the numbers of other classes are below 1
        chosen = keys.topk(size, sorted=False).indices.sort().values
        return proxies.index_select(0, chosen), torch.searchsorted(chosen, labels)
