"""CurricularFace loss."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Fraction, NonNegative, Positive, Real
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss
from unimetric.losses._classes import Classes


class CurricularFace(Loss):
    """Angular-margin softmax that weights hard negatives more as training progresses.

        mean over the batch of  -log softmax_y(scale * logits),   logits_y = cos(theta_y + margin)

        logits_c = cos theta_c                     if cos theta_c <= cos(theta_y + margin)
                   cos theta_c (t + cos theta_c)   otherwise (hard negatives)
        t <- 0.99 t + 0.01 mean cos theta_y        before each use, from 0, without gradient

    theta_c is the angle to a learned direction per class. If theta_y + margin exceeds pi, logits_y
    is cos theta_y - margin sin(pi - margin). t is updated in training mode only.

    Differs from the paper:
        `per_class_t=True` is PUMA's code, with `scale=32, margin=0.3`. It has one t per class and
        uses that of the sample's class. It updates t after use, for the classes in the batch.
        Negatives are hard above logits_y, including its linear part. The directions start uniform
        within 1/sqrt(D), as those of `arcface`; PUMA's start uniform within sqrt(6/C).

    Reference:
        CurricularFace: adaptive curriculum learning loss for deep face recognition (Huang et al.,
        CVPR 2020).

    Args:
        margin: Angular margin in radians.
        scale: Inverse temperature.
        per_class_t: Use one t per class, as PUMA's code does.
        momentum: Fraction of t that each update keeps.
        lr: Learning rate of the class directions. The paper's rate is for plain SGD; this is that
            of `arcface`.
        weight_decay: Weight decay of the class directions. PUMA's code uses 1e-4.
        negatives: Fraction of the classes that a training step uses: those of the batch, and random others, as in
            Partial FC (An et al., ICCVW 2021). 1 uses all. Smaller values save time and memory with very many classes.
        sharded: Whether each process of a run on several devices holds the directions of a part of the classes. The result is
            the same, except for the random sample of `negatives`.
        num_classes: Number of training classes.
        dim: Embedding dimension.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "proxy"
    t: Tensor

    def __init__(
        self,
        *,
        margin: Real = 0.5,
        scale: Positive = 64.0,
        per_class_t: bool = False,
        momentum: Fraction = 0.99,
        lr: NonNegative = 5e-4,
        weight_decay: NonNegative = 0.0,
        negatives: Fraction = 1.0,
        sharded: bool = False,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.margin, self.scale, self.per_class_t, self.momentum, self.lr = margin, scale, per_class_t, momentum, lr
        self.group = {"weight_decay": weight_decay}
        self.sample = Classes(num_classes, fraction=negatives, sharded=sharded)
        self.proxies = self.sample.draw_directions(dim)
        self.register_buffer("t", torch.zeros(num_classes if per_class_t else 1))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings, proxies, rows = self.sample.choose(embeddings, self.proxies, labels)
        # The slope of the sine is infinite at 1. The distance to 1 must be visible in float32.
        cosine = class_cosines(embeddings, proxies).clamp(-1 + 1e-7, 1 - 1e-7)
        target = self.sample.target(cosine, rows)
        turned = target * math.cos(self.margin) - (1 - target.square()).sqrt() * math.sin(self.margin)
        beyond = target - math.sin(math.pi - self.margin) * self.margin
        logit = torch.where(target > math.cos(math.pi - self.margin), turned, beyond)
        if self.per_class_t:
            # Copy t, because it changes below before the backward pass reads it.
            t, bound = self.t[labels][:, None].clone(), logit
            self._renew(target, labels)
        else:
            self._renew(target, labels)
            t, bound = self.t.clone(), turned
        hard = torch.where(cosine > bound, cosine * (t + cosine), cosine)
        return self.sample.cross_entropy(self.scale * self.sample.with_target(hard, rows, logit), rows)

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
