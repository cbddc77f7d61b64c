"""Normalized softmax loss."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.arguments import Count, Fraction, NonNegative, Positive
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss
from unimetric.losses._classes import ClassSample


class NormalizedSoftmax(Loss):
    """Cross entropy over cosine similarities to one learned direction per class.

        mean over the batch of  -log softmax_y(cos(f, w_c) / temperature)

    w_c is a learned direction per class.

    Differs from the paper:
        The denominator of eq. 19 of Roth et al. 2020 omits the positive class, and the equation
        omits the mean. The layer normalization of Zhai and Wu belongs to a head, not to the loss;
        Roth et al. do not use it.

    Reference:
        Classification is a strong baseline for deep metric learning (Zhai & Wu, BMVC 2019); eq. 19
        of Roth et al. 2020.

    Args:
        temperature: Divisor of the cosines.
        lr: Learning rate of the class directions. Roth et al. use 0.002 on Stanford Online
            Products.
        weight_decay: Weight decay of the class directions. PUMA's code uses 1e-4 for all its
            proxies.
        negatives: Fraction of the classes that a training step uses: those of the batch, and random others, as in
            Partial FC (An et al., ICCVW 2021). 1 uses all. Smaller values save time and memory with very many classes.
        num_classes: Number of training classes.
        dim: Embedding dimension.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "proxy"

    def __init__(
        self,
        *,
        temperature: Positive = 0.05,
        lr: NonNegative = 1e-5,
        weight_decay: NonNegative = 0.0,
        negatives: Fraction = 1.0,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.temperature, self.lr = temperature, lr
        self.group = {"weight_decay": weight_decay}
        self.sample = ClassSample(negatives)
        self.proxies = nn.Parameter(torch.empty(num_classes, dim).uniform_(-1, 1) / math.sqrt(dim))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        proxies, labels = self.sample(self.proxies, labels)
        return F.cross_entropy(class_cosines(embeddings, proxies) / self.temperature, labels)
