"""ProxyNCA: one learnt proxy a class."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, class_cosines


class ProxyNCA(nn.Module):
    """No fuss distance metric learning using proxies (Movshovitz-Attias et al., ICCV 2017); eq. 13 of Roth et al. 2020.

        mean over the batch of  D(x, p_y) + log sum_{c != y} exp(-D(x, p_c))

    with D the squared Euclidean distance, and x and the proxies p_c of length `scale`.

    Differs from the printed equation: the distance is squared, and the factor 3 on both lengths (a temperature of 1/9), which the paper
    does not mention, is that of the authors' code. The denominator leaves out the positive, unlike `proxy_nca_pp` and
    pytorch-metric-learning's ProxyNCALoss.

    Args:
        scale: length of embeddings and proxies.
        lr: learning rate of the proxies; 50 times that of the network.
        num_classes: training classes, at least two.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(self, *, scale: float = 3.0, lr: float = 5e-4, num_classes: int, dim: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise UnimetricError("the loss `proxy_nca` compares a class with the others, and there is one class", "use `proxy_nca_pp`")
        self.scale, self.lr = scale, lr
        self.proxies = nn.Parameter(torch.randn(num_classes, dim) / 8)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        distance = 2 * self.scale**2 * (1 - class_cosines(embeddings, self.proxies))  # (B, C)
        pull = distance.gather(1, labels[:, None])[:, 0]
        push = (-distance).scatter(1, labels[:, None], -math.inf).logsumexp(1)
        return (pull + push).mean()
