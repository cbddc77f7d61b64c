"""ArcFace: a softmax over class directions with an additive angular margin."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import Memory, class_cosines


class ArcFace(nn.Module):
    """ArcFace: additive angular margin loss (Deng et al., CVPR 2019); eq. 6 of Roth et al. 2020.

        mean over the batch of  -log softmax_y(scale * logits),  logits_y = cos(arccos(w_y . f) + margin),  logits_c = w_c . f

    with f the unit embedding and w_c a learnt unit direction per class.

    Differs from the printed equation: the arc cosine is restored, and the sum runs over classes, not over the batch. The numbers of
    Roth et al. come from code that added the margin to every logit, where it cancels: a plain normalised softmax. Here it is corrected.

    Args:
        margin: angle in radians.
        scale: inverse temperature; 16 in Roth et al., 64 in PUMA.
        fallback: beyond pi - margin, where the angle would wrap, go on linearly (PUMA's code).
        clamp_positive: clamp cosines to be positive, as the code of Roth et al. does; flattens every obtuse angle.
        lr: learning rate of the class directions.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(
        self,
        *,
        margin: float = 0.5,
        scale: float = 16.0,
        fallback: bool = False,
        clamp_positive: bool = False,
        lr: float = 5e-4,
        num_classes: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.margin, self.scale, self.fallback, self.clamp_positive, self.lr = margin, scale, fallback, clamp_positive, lr
        self.proxies = nn.Parameter(torch.empty(num_classes, dim).uniform_(-1, 1) / math.sqrt(dim))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        # Short of 1 by enough that float32 sees it: the slope of the arc cosine is infinite there.
        low, high = (1e-10, 1 - 1e-7) if self.clamp_positive else (-1 + 1e-7, 1 - 1e-7)
        cosine = class_cosines(embeddings, self.proxies).clamp(low, high)
        target = cosine.gather(1, labels[:, None])
        turned = target * math.cos(self.margin) - (1 - target.square()).sqrt() * math.sin(self.margin)
        if self.fallback:
            turned = torch.where(target > math.cos(math.pi - self.margin), turned, target - math.sin(math.pi - self.margin) * self.margin)
        return F.cross_entropy(self.scale * cosine.scatter(1, labels[:, None], turned), labels)
