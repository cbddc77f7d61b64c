"""ProxyNCA++: proxies as a softmax."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.geometry import Memory, class_cosines


class ProxyNCAPP(nn.Module):
    """ProxyNCA++: revisiting and revitalizing proxy neighborhood component analysis (Teh et al., ECCV 2020).

        mean over the batch of  -log softmax_y(-D(f, p_c) / temperature)

    with D the squared Euclidean distance of unit vectors, so that the softmax is of 2 cos(f, p_c) / temperature.

    Differs from the paper: its pooling and normalisation are parts of a head, not of the loss; and its learning rate of 400 belongs to
    an Adam with epsilon 1, so that the one here is that of `proxy_anchor`. PUMA's code has a temperature of 1.

    Args:
        temperature: 1/9 in the paper, as both lengths are multiplied by 3; 1 in PUMA.
        lr: learning rate of the proxies.
        num_classes: training classes.
        dim: embedding dimension.
    """

    family = "proxy"

    def __init__(self, *, temperature: float = 1 / 9, lr: float = 1e-2, num_classes: int, dim: int) -> None:
        super().__init__()
        self.temperature, self.lr = temperature, lr
        self.proxies = nn.Parameter(torch.randn(num_classes, dim) / 8)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        # -D = 2 cos - 2, and the constant cancels in the softmax.
        return F.cross_entropy(class_cosines(embeddings, self.proxies) * (2 / self.temperature), labels)
