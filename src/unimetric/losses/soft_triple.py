"""SoftTriple: several learnt centres a class."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import Memory, class_cosines, unit


class SoftTriple(nn.Module):
    """SoftTriple loss: deep metric learning without triplet sampling (Qian et al., ICCV 2019); eqs. 16 to 18 of Roth et al. 2020.

        mean over the batch of  -log softmax_y(scale * (S_c - margin [c = y])),   S_c = sum_k softmax_k(s_ck / gamma) s_ck
        + tau / (C K (K - 1))  sum over classes and pairs k < k' of  sqrt(2 - 2 w_ck . w_ck')

    with s_ck the cosine to centre w_ck of class c; the second line lets centres merge.

    Differs from the printed equations: eq. 16 lacks the factor s_ck, without which S is always 1, and in eq. 18 it is K that counts
    the centres. The code of Roth et al. normalises the wrong axis and takes the softmax over classes; this is the formula of the
    original, with the values of Roth et al. Qian et al. and PUMA have `scale=20, centers_per_class=10`, and PUMA `tau=0`.

    Args:
        scale: inverse temperature; lambda in the paper.
        margin: taken off the similarity to the sample's own class; delta in the paper.
        gamma: temperature of the choice among a class's centres.
        tau: weight of the merging of centres.
        centers_per_class: K.
        lr: learning rate of the centres; 0.01 in the original.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(
        self,
        *,
        scale: float = 8.0,
        margin: float = 0.01,
        gamma: float = 0.1,
        tau: float = 0.2,
        centers_per_class: int = 2,
        lr: float = 1e-5,
        num_classes: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.scale, self.margin, self.gamma, self.tau, self.lr = scale, margin, gamma, tau, lr
        bound = 1 / math.sqrt(num_classes * centers_per_class)
        self.proxies = nn.Parameter(torch.empty(num_classes, centers_per_class, dim).uniform_(-bound, bound))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        classes, centers, _ = self.proxies.shape
        # Centres before classes: a softmax over a long last axis is fast, one over K numbers is not.
        cosine = class_cosines(embeddings, self.proxies.transpose(0, 1).flatten(0, 1)).unflatten(1, (centers, classes))  # (B, K, C)
        similarity = ((cosine / self.gamma).softmax(1) * cosine).sum(1)  # (B, C)
        lowered = similarity.scatter_add(1, labels[:, None], torch.full_like(similarity[:, :1], -self.margin))
        loss = F.cross_entropy(self.scale * lowered, labels)
        if self.tau == 0 or centers == 1:
            return loss
        w = unit(self.proxies)
        products = torch.cat([(w[:, step:] * w[:, :-step]).sum(-1) for step in range(1, centers)], 1)  # (C, K (K - 1) / 2)
        # The authors' 1e-5 keeps the gradient finite where centres have merged.
        apart = (2 + 1e-5 - 2 * products).clamp_min(1e-5).sqrt()
        return loss + self.tau * apart.sum() / (classes * centers * (centers - 1))
