"""Normalized softmax loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Fraction, NonNegative, Positive
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss
from unimetric.losses._classes import Classes


class NormalizedSoftmax(Loss):
    """Cross entropy over cosine similarities to one learned direction per class.

        mean over the batch of  -log softmax_y(cos(f, w_c) / temperature)

    w_c is a learned direction per class.

    Differs from the paper:
        The denominator of eq. 19 of Roth et al. 2020 omits the positive class, and the equation
        omits the mean. The layer normalization of Zhai and Wu belongs to a head, not to the loss;
        Roth et al. do not use it.

    Reference:
        Classification is a strong baseline for deep metric learning (Zhai & Wu, BMVC 2019); eq. 19
        of Roth et al. 2020.

    Args:
        temperature: Divisor of the cosines.
        lr: Learning rate of the class directions. Roth et al. use 0.002 on Stanford Online
            Products.
        weight_decay: Weight decay of the class directions. PUMA's code uses 1e-4 for all its
            proxies.
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
        temperature: Positive = 0.05,
        lr: NonNegative = 1e-5,
        weight_decay: NonNegative = 0.0,
        negatives: Fraction = 1.0,
        sharded: bool = False,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.temperature, self.lr = temperature, lr
        self.group = {"weight_decay": weight_decay}
        self.sample = Classes(num_classes, fraction=negatives, sharded=sharded)
        self.proxies = self.sample.draw_directions(dim)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings, proxies, rows = self.sample.choose(embeddings, self.proxies, labels)
        return self.sample.cross_entropy(class_cosines(embeddings, proxies) / self.temperature, rows)
