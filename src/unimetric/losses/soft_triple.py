"""SoftTriple loss."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.arguments import Count, NonNegative, Positive, Real
from unimetric.geometry import Memory, class_cosines, unit
from unimetric.kinds import Loss


class SoftTriple(Loss):
    """Softmax over classes with several learned centers per class.

        mean over the batch of  -log softmax_y(scale * (S_c - margin [c = y]))
        + tau / (C K (K - 1))  sum over classes and pairs k < k' of  sqrt(2 - 2 w_ck . w_ck')

        S_c = sum_k softmax_k(s_ck / gamma) s_ck

    s_ck is the cosine to center w_ck of class c. The second term lets centers merge.

    Differs from the paper:
        Eq. 16 of Roth et al. 2020 omits the factor s_ck, without which S is always 1. In eq. 18, K
        counts the centers. Their code has two bugs. It normalizes the centers along the wrong axis.
        It computes the softmax over classes of gamma s_ck, instead of over centers of s_ck / gamma.
        With both undone, the values are equal. This is the formula of the original with the values
        of Roth et al. Qian et al. and PUMA use `scale=20, centers_per_class=10`, and PUMA uses
        `tau=0`.

    Reference:
        SoftTriple loss: deep metric learning without triplet sampling (Qian et al., ICCV 2019);
        eqs. 16 to 18 of Roth et al. 2020.

    Args:
        scale: Inverse temperature; lambda in the paper.
        margin: Margin subtracted from the similarity to the sample's class; delta in the paper.
        gamma: Temperature of the softmax over the centers of a class.
        tau: Weight of the regularizer that merges centers.
        centers_per_class: Number of centers per class; K in the paper.
        lr: Learning rate of the centers. The original uses 0.01.
        weight_decay: Weight decay of the centers. PUMA's code uses 1e-4.
        num_classes: Number of training classes.
        dim: Embedding dimension.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "proxy"

    def __init__(
        self,
        *,
        scale: Positive = 8.0,
        margin: Real = 0.01,
        gamma: Positive = 0.1,
        tau: NonNegative = 0.2,
        centers_per_class: Count = 2,
        lr: NonNegative = 1e-5,
        weight_decay: NonNegative = 0.0,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.scale, self.margin, self.gamma, self.tau, self.lr = scale, margin, gamma, tau, lr
        self.group = {"weight_decay": weight_decay}
        bound = 1 / math.sqrt(num_classes * centers_per_class)
        self.proxies = nn.Parameter(torch.empty(num_classes, centers_per_class, dim).uniform_(-bound, bound))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        classes, centers, _ = self.proxies.shape
        # Centers come before classes, because a softmax over K entries of the last axis is slow.
        cosine = class_cosines(embeddings, self.proxies.transpose(0, 1).flatten(0, 1)).unflatten(1, (centers, classes))  # (B, K, C)
        similarity = ((cosine / self.gamma).softmax(1) * cosine).sum(1)  # (B, C)
        lowered = similarity.scatter_add(1, labels[:, None], torch.full_like(similarity[:, :1], -self.margin))
        loss = F.cross_entropy(self.scale * lowered, labels)
        if self.tau == 0 or centers == 1:
            return loss
        w = unit(self.proxies)
        products = torch.cat([(w[:, step:] * w[:, :-step]).sum(-1) for step in range(1, centers)], 1)  # (C, K (K - 1) / 2)
        # The authors' 1e-5 keeps the gradient finite if centers have merged.
        apart = (2 + 1e-5 - 2 * products).clamp_min(1e-5).sqrt()
        return loss + self.tau * apart.sum() / (classes * centers * (centers - 1))
