"""ProxyNCA loss."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Count, NonNegative, Positive, Range
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss


class ProxyNCA(Loss):
    """Neighborhood component analysis with one learned proxy per class.

        mean over the batch of  D(x, p_y) + log sum_{c != y} exp(-D(x, p_c))

    D is the squared Euclidean distance. The embeddings x and the proxies p_c have length `scale`.

    Differs from the paper:
        The distance is squared, unlike in eq. 13 of Roth et al. 2020. The factor 3 on both lengths
        (a temperature of 1/9) is from their code; the paper does not mention it. The denominator
        excludes the positive, unlike `proxy_nca_pp` and pytorch-metric-learning's ProxyNCALoss.

    Reference:
        No fuss distance metric learning using proxies (Movshovitz-Attias et al., ICCV 2017); eq. 13
        of Roth et al. 2020.

    Args:
        scale: Length of embeddings and proxies.
        lr: Learning rate of the proxies. The default is 50 times that of the network in Roth et al.
        weight_decay: Weight decay of the proxies. The code of Proxy-Anchor and of PUMA uses 1e-4.
        num_classes: Number of training classes, at least 2.
        dim: Embedding dimension.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "proxy"

    def __init__(
        self,
        *,
        scale: Positive = 3.0,
        lr: NonNegative = 5e-4,
        weight_decay: NonNegative = 0.0,
        num_classes: Annotated[int, Range(2)],
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.scale, self.lr = scale, lr
        self.group = {"weight_decay": weight_decay}
        self.proxies = nn.Parameter(torch.randn(num_classes, dim) / 8)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        distance = 2 * self.scale**2 * (1 - class_cosines(embeddings, self.proxies))  # (B, C)
        pull = distance.gather(1, labels[:, None])[:, 0]
        push = (-distance).scatter(1, labels[:, None], -math.inf).logsumexp(1)
        return (pull + push).mean()
