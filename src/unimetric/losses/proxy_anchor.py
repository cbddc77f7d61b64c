"""Proxy-Anchor loss."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.arguments import Count, NonNegative, Positive, Real
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss


class ProxyAnchor(Loss):
    """Loss with one learned proxy per class as the anchor and the batch as its pairs.

        mean over classes in the batch of  log(1 + sum_{x of c} exp(-alpha (cos(x, p_c) - margin)))
        + mean over all classes of  log(1 + sum_{x not of c} exp(alpha (cos(x, p_c) + margin)))

    p_c is the proxy of class c. The formula is the paper's.

    Differs from the paper:
        The paper's code decays the proxies by 1e-4, and so does PUMA's. The default here is 0; use
        `weight_decay=1e-4` to follow them. ooDML's code weights each class of the first mean by its
        frequency in the batch. That is the same if all classes have equally many samples. The
        proxies start normal with variance 2/C, as in the paper's code. ooDML's start normal with
        variance 1/64, PUMA's uniform with variance 2/C.

    Reference:
        Proxy anchor loss for deep metric learning (Kim et al., CVPR 2020).

    Args:
        alpha: Inverse temperature.
        margin: Margin added to both terms.
        lr: Learning rate of the proxies. The paper uses 100 times that of the network, ooDML 0.02.
        weight_decay: Weight decay of the proxies. The code of Proxy-Anchor and of PUMA uses 1e-4.
        num_classes: Number of training classes.
        dim: Embedding dimension.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "proxy"

    def __init__(
        self,
        *,
        alpha: Positive = 32.0,
        margin: Real = 0.1,
        lr: NonNegative = 1e-2,
        weight_decay: NonNegative = 0.0,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.alpha, self.margin, self.lr = alpha, margin, lr
        self.group = {"weight_decay": weight_decay}
        self.proxies = nn.Parameter(torch.randn(num_classes, dim) * math.sqrt(2 / num_classes))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        cosine = class_cosines(embeddings, self.proxies)  # (B, C)
        low, own = torch.finfo(cosine.dtype).min / 4, labels[:, None]
        # Each sample has one positive proxy. All other entries are so low that they add nothing to the sum of exponentials.
        pull = torch.full_like(cosine, low).scatter(1, own, -self.alpha * (cosine.gather(1, own) - self.margin)).logsumexp(0)  # (C,)
        push = (self.alpha * (cosine + self.margin)).scatter(1, own, low).logsumexp(0)
        return softplus(pull).sum() / (pull > low / 2).sum() + softplus(push).mean()
