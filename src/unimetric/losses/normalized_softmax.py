"""Normalised softmax: classification on the sphere."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import Memory, class_cosines


class NormalizedSoftmax(nn.Module):
    """Classification is a strong baseline for deep metric learning (Zhai and Wu, BMVC 2019); eq. 19 of Roth et al. 2020.

        mean over the batch of  -log softmax_y(cos(f, w_c) / temperature)

    with w_c a learnt direction per class.

    Differs from the printed equation: its denominator lacks the class itself, and the mean. Zhai and Wu's layer normalisation is a part
    of a head, not of the loss; Roth et al. do without.

    Args:
        temperature: divides the cosines.
        lr: learning rate of the class directions; 0.002 on Stanford Online Products.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(self, *, temperature: float = 0.05, lr: float = 1e-5, num_classes: int, dim: int) -> None:
        super().__init__()
        self.temperature, self.lr = temperature, lr
        self.proxies = nn.Parameter(torch.empty(num_classes, dim).uniform_(-1, 1) / math.sqrt(dim))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        return F.cross_entropy(class_cosines(embeddings, self.proxies) / self.temperature, labels)
