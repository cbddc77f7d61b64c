"""ArcFace loss."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Fraction, NonNegative, Positive, Real
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss
from unimetric.losses._classes import Classes


class ArcFace(Loss):
    """Softmax over class directions with an additive angular margin.

        mean over the batch of  -log softmax_y(scale * logits)

        logits_y = cos(arccos(w_y . f) + margin),   logits_c = w_c . f

    f is the normalized embedding and w_c a learned unit vector per class.

    Differs from the paper:
        Eq. 6 of Roth et al. 2020 omits the arc cosine and sums over the batch instead of the
        classes. Their results come from code that added the margin to every logit, where it
        cancels. That is a normalized softmax; here the margin is added to the target logit only.
        Their code also clamps cosines to be positive. `clamp_positive=True` reproduces its value;
        the default is 1.04 to 1.10 times as large on random batches.

    Reference:
        ArcFace: additive angular margin loss (Deng et al., CVPR 2019); eq. 6 of Roth et al. 2020.

    Args:
        margin: Angular margin in radians.
        scale: Inverse temperature. Roth et al. use 16, PUMA uses 64.
        fallback: Continue linearly beyond an angle of pi - margin, where the cosine would increase
            again. PUMA's code does so.
        clamp_positive: Clamp cosines to be positive, as the code of Roth et al. does. The gradient
            of every angle above 90 degrees is then zero.
        lr: Learning rate of the class directions.
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

    def __init__(
        self,
        *,
        margin: Real = 0.5,
        scale: Positive = 16.0,
        fallback: bool = False,
        clamp_positive: bool = False,
        lr: NonNegative = 5e-4,
        weight_decay: NonNegative = 0.0,
        negatives: Fraction = 1.0,
        sharded: bool = False,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.margin, self.scale, self.fallback, self.clamp_positive, self.lr = margin, scale, fallback, clamp_positive, lr
        self.group = {"weight_decay": weight_decay}
        self.sample = Classes(num_classes, fraction=negatives, sharded=sharded)
        self.proxies = self.sample.draw_directions(dim)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings, proxies, rows = self.sample.choose(embeddings, self.proxies, labels)
        # The slope of the arc cosine is infinite at 1. The distance to 1 must be visible in float32.
        low, high = (1e-10, 1 - 1e-7) if self.clamp_positive else (-1 + 1e-7, 1 - 1e-7)
        cosine = class_cosines(embeddings, proxies).clamp(low, high)
        target = self.sample.target(cosine, rows)
        turned = target * math.cos(self.margin) - (1 - target.square()).sqrt() * math.sin(self.margin)
        if self.fallback:
            turned = torch.where(target > math.cos(math.pi - self.margin), turned, target - math.sin(math.pi - self.margin) * self.margin)
        return self.sample.cross_entropy(self.scale * self.sample.with_target(cosine, rows, turned), rows)
