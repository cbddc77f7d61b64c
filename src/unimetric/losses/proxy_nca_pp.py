"""ProxyNCA++ loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.arguments import Count, NonNegative, Positive
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss


class ProxyNCAPP(Loss):
    """Softmax over squared distances to one learned proxy per class.

        mean over the batch of  -log softmax_y(-D(f, p_c) / temperature)

    D is the squared Euclidean distance of unit vectors. The softmax is therefore over 2 cos(f,
    p_c) / temperature.

    Differs from the paper:
        The paper's pooling and normalization belong to a head, not to the loss. Its learning rate
        of 400 is for Adam with epsilon 1; the default here is that of `proxy_anchor`. PUMA's code
        has a temperature of 1.

    Reference:
        ProxyNCA++: revisiting and revitalizing proxy neighborhood component analysis (Teh et al.,
        ECCV 2020).

    Args:
        temperature: Divisor of the distances. The paper uses 1/9, because it multiplies both
            lengths by 3. PUMA uses 1.
        lr: Learning rate of the proxies.
        weight_decay: Weight decay of the proxies. PUMA's code uses 1e-4.
        num_classes: Number of training classes.
        dim: Embedding dimension.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "proxy"

    def __init__(
        self, *, temperature: Positive = 1 / 9, lr: NonNegative = 1e-2, weight_decay: NonNegative = 0.0, num_classes: Count, dim: Count
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.temperature, self.lr = temperature, lr
        self.group = {"weight_decay": weight_decay}
        self.proxies = nn.Parameter(torch.randn(num_classes, dim) / 8)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        # -D = 2 cos - 2, and the constant cancels in the softmax.
        return F.cross_entropy(class_cosines(embeddings, self.proxies) * (2 / self.temperature), labels)
