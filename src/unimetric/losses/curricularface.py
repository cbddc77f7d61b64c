"""CurricularFace: easy negatives first, hard ones as training goes on."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import Memory, class_cosines


class CurricularFace(nn.Module):
    """CurricularFace: adaptive curriculum learning loss for deep face recognition (Huang et al., CVPR 2020).

        mean over the batch of  -log softmax_y(scale * logits),   logits_y = cos(theta_y + margin)

        logits_c = cos theta_c,                     where cos theta_c <= cos(theta_y + margin)
                   cos theta_c (t + cos theta_c),   for the hard ones
        t <- 0.99 t + 0.01 mean cos theta_y,        before each use, from 0, without gradient

    with theta_c the angle to a learnt direction per class. Where theta_y + margin exceeds pi, logits_y goes on linearly, as
    cos theta_y - margin sin(pi - margin).

    `per_class_t=True` is PUMA's code (with `scale=32, margin=0.3`): a t for each class, that of the sample's class counts; renewed after
    use, for classes in the batch; and negatives count as hard above logits_y, linear part included. t moves in training mode only. The
    directions start as `arcface`'s, even within 1/sqrt(D); PUMA's within sqrt(6/C).

    Args:
        margin: angle in radians.
        scale: inverse temperature.
        per_class_t: one t a class, as in PUMA's code.
        momentum: how much of t is kept.
        lr: learning rate of the class directions; the paper's belongs to plain descent, this is `arcface`'s.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"
    t: Tensor

    def __init__(
        self,
        *,
        margin: float = 0.5,
        scale: float = 64.0,
        per_class_t: bool = False,
        momentum: float = 0.99,
        lr: float = 5e-4,
        num_classes: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.margin, self.scale, self.per_class_t, self.momentum, self.lr = margin, scale, per_class_t, momentum, lr
        self.proxies = nn.Parameter(torch.empty(num_classes, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.register_buffer("t", torch.zeros(num_classes if per_class_t else 1))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        # Short of 1 by enough that float32 sees it: the slope of the sine is infinite there.
        cosine = class_cosines(embeddings, self.proxies).clamp(-1 + 1e-7, 1 - 1e-7)
        target = cosine.gather(1, labels[:, None])  # (B, 1)
        turned = target * math.cos(self.margin) - (1 - target.square()).sqrt() * math.sin(self.margin)
        beyond = target - math.sin(math.pi - self.margin) * self.margin
        logit = torch.where(target > math.cos(math.pi - self.margin), turned, beyond)
        if self.per_class_t:
            # A copy: t changes below, before the backward pass reads it.
            t, bound = self.t[labels][:, None].clone(), logit
            self._renew(target, labels)
        else:
            self._renew(target, labels)
            t, bound = self.t.clone(), turned
        hard = torch.where(cosine > bound, cosine * (t + cosine), cosine)
        return F.cross_entropy(self.scale * hard.scatter(1, labels[:, None], logit), labels)

    def _renew(self, target: Float[Tensor, "B 1"], labels: Int[Tensor, "B"]) -> None:
        if not self.training:
            return
        seen = target.detach()[:, 0]
        if self.per_class_t:
            count = torch.zeros_like(self.t).index_add(0, labels, torch.ones_like(seen))
            mean = torch.zeros_like(self.t).index_add(0, labels, seen) / count.clamp_min(1)
            new = torch.where(count > 0, self.momentum * self.t + (1 - self.momentum) * mean, self.t)
        else:
            new = self.momentum * self.t + (1 - self.momentum) * seen.mean()
        self.t.copy_(new)
