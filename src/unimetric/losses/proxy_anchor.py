"""Proxy-Anchor: proxies are the anchors, the batch is what they choose from."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.geometry import Memory, class_cosines


class ProxyAnchor(nn.Module):
    """Proxy anchor loss for deep metric learning (Kim et al., CVPR 2020).

        mean over classes in the batch of  log(1 + sum_{x of c} exp(-alpha (cos(x, p_c) - margin)))
        + mean over all classes of         log(1 + sum_{x not of c} exp(alpha (cos(x, p_c) + margin)))

    As in the paper. ooDML's code weighs each class of the first mean by its frequency in the batch; with as many samples of each class
    that is the same. The proxies start normal with variance 2/C, as in the paper's code; ooDML's with 1/64, PUMA's even with variance 2/C.

    Args:
        alpha: sharpness.
        margin: added to both sides.
        lr: learning rate of the proxies; 100 times that of the network in the paper, 0.02 in ooDML.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(self, *, alpha: float = 32.0, margin: float = 0.1, lr: float = 1e-2, num_classes: int, dim: int) -> None:
        super().__init__()
        self.alpha, self.margin, self.lr = alpha, margin, lr
        self.proxies = nn.Parameter(torch.randn(num_classes, dim) * math.sqrt(2 / num_classes))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        cosine = class_cosines(embeddings, self.proxies)  # (B, C)
        low, own = torch.finfo(cosine.dtype).min / 4, labels[:, None]
        # Each sample has one proxy that pulls it: scattered, the rest of the matrix adds nothing to a sum of exponentials.
        pull = torch.full_like(cosine, low).scatter(1, own, -self.alpha * (cosine.gather(1, own) - self.margin)).logsumexp(0)  # (C,)
        push = (self.alpha * (cosine + self.margin)).scatter(1, own, low).logsumexp(0)
        return softplus(pull).sum() / (pull > low / 2).sum() + softplus(push).mean()
