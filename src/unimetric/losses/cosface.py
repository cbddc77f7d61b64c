"""CosFace: a softmax over class directions with a margin on the cosine."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import Memory, class_cosines


class CosFace(nn.Module):
    """CosFace: large margin cosine loss for deep face recognition (Wang et al., CVPR 2018).

        mean over the batch of  -log softmax_y(scale * (cos(f, w_c) - margin [c = y]))

    with w_c a learnt direction per class. As in the paper. PUMA's code writes the logarithm out, which overflows in half precision.

    Args:
        margin: taken off the cosine to the sample's own class.
        scale: inverse temperature.
        lr: learning rate of the class directions; the paper gives none, this is `arcface`'s.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(self, *, margin: float = 0.35, scale: float = 64.0, lr: float = 5e-4, num_classes: int, dim: int) -> None:
        super().__init__()
        self.margin, self.scale, self.lr = margin, scale, lr
        self.proxies = nn.Parameter(torch.empty(num_classes, dim).uniform_(-1, 1) / math.sqrt(dim))

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        cosine = class_cosines(embeddings, self.proxies)
        lowered = cosine.scatter_add(1, labels[:, None], torch.full_like(cosine[:, :1], -self.margin))
        return F.cross_entropy(self.scale * lowered, labels)
