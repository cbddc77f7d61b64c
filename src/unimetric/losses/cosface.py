"""CosFace loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Fraction, NonNegative, Positive, Real
from unimetric.geometry import Memory, class_cosines
from unimetric.kinds import Loss
from unimetric.losses._classes import Classes


class CosFace(Loss):
    """Softmax over class directions with a margin on the cosine.

        mean over the batch of  -log softmax_y(scale * (cos(f, w_c) - margin [c = y]))

    w_c is a learned direction per class. The formula is the paper's.

    Differs from the paper:
        PUMA's code expands the logarithm, which overflows in half precision. The value is the same.

    Reference:
        CosFace: large margin cosine loss for deep face recognition (Wang et al., CVPR 2018).

    Args:
        margin: Margin subtracted from the cosine to the sample's class.
        scale: Inverse temperature.
        lr: Learning rate of the class directions. The paper states none; this is that of `arcface`.
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
        margin: Real = 0.35,
        scale: Positive = 64.0,
        lr: NonNegative = 5e-4,
        weight_decay: NonNegative = 0.0,
        negatives: Fraction = 1.0,
        sharded: bool = False,
        num_classes: Count,
        dim: Count,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.margin, self.scale, self.lr = margin, scale, lr
        self.group = {"weight_decay": weight_decay}
        self.sample = Classes(num_classes, fraction=negatives, sharded=sharded)
        self.proxies = self.sample.draw_directions(dim)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings, proxies, rows = self.sample.choose(embeddings, self.proxies, labels)
        cosine = class_cosines(embeddings, proxies)
        own = (rows >= 0).to(cosine.dtype)[:, None]  # another rank may hold the direction of a label
        lowered = cosine.scatter_add(1, rows[:, None].clamp_min(0), -self.margin * own)
        return self.sample.cross_entropy(self.scale * lowered, rows)
