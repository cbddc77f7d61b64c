"""Fine-tuning that stays near its start: in the weights, and in the similarities."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, NonNegative, Seed
from unimetric.geometry import cosines, upcast_half
from unimetric.kinds import Output
from unimetric.objectives._around import Around


class Anchored(Around):
    """Any objective, and the distances to the starting weights and similarities.

        L = objective + weights / 2 sum_w (w - w0)^2 + similarities / B^2 sum_ij (S_ij - S0_ij)^2

    w are the trained parameters of the backbone and w0 their values before the first step. S are the cosine
    similarities of the embeddings of a batch, and S0 those of the features (global tokens) of the starting
    backbone for the same crops. The head is not anchored in its weights, because it starts from random ones.
    The starting backbone is a frozen copy. It is rebuilt on resume and is not part of the checkpoint.

    Differs from the paper:
        L2-SP also decays new layers toward zero; here that is the weight decay of the optimizer. Tung and
        Mori compare normalized inner products of feature maps; here they are cosines.

    Reference:
        Explicit inductive bias for transfer learning with convolutional networks (Li et al., ICML 2018);
        Similarity-preserving knowledge distillation (Tung and Mori, ICCV 2019).

    Args:
        objective: Spec string of the objective.
        weights: Weight of the distance to the starting weights; 0 skips it.
        similarities: Weight of the distance to the starting similarities; 0 skips it, and with it one forward
            pass of the starting backbone per step.
        half_start: Whether the starting backbone runs in bfloat16 on a GPU.
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
        branches: Dimensions of the head's branches. Provided by the run.
        features: Number of backbone channels. Provided by the run.
        batch_size: Number of images per step. Provided by the run.
        seed: Seed of the run. Provided by the run.
    """

    def __init__(
        self,
        *,
        objective: str = "plain",
        weights: NonNegative = 0.01,
        similarities: NonNegative = 1.0,
        half_start: bool = True,
        loss: str = "margin",
        miner: str | None = None,
        num_classes: Count,
        dim: Count,
        branches: tuple[Count, ...],
        features: Count,
        batch_size: Count,
        seed: Seed = 0,
    ) -> None:
        sizes = {"num_classes": num_classes, "dim": dim, "branches": branches, "features": features}
        super().__init__(objective, loss=loss, miner=miner, **sizes, batch_size=batch_size, seed=seed)
        self.weights, self.similarities, self.half_start = weights, similarities, half_start
        self.start: list[Any] = []  # the copy and the backbone, in a list, so that neither checkpoint nor optimizer contains the copy
        self.pairs: list[tuple[Tensor, Tensor]] = []  # trained parameters of the backbone, and their starting values

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple({*self.inner.reads, "images"}) if self.similarities else self.inner.reads

    def meet(self, model: Any) -> None:
        """Copy the backbone, which has its starting weights."""
        start = copy.deepcopy(model.backbone).eval()
        both = zip(model.backbone.parameters(), start.parameters(), strict=True)
        self.pairs = [(trained, fixed.requires_grad_(False)) for trained, fixed in both if trained.requires_grad]
        self.start = [start.requires_grad_(False), model.backbone]
        self.inner.meet(model)

    def begin(self) -> None:
        first = next(zip(*(backbone.parameters() for backbone in self.start), strict=True), None)
        if first is not None and first[0].device != first[1].device:
            self.start[0].to(first[1].device)
        self.inner.begin()

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        terms = self.inner(output, labels)
        if self.weights and self.pairs:
            squares = [(trained - fixed).square().sum() for trained, fixed in self.pairs]
            terms["weights"] = self.weights / 2 * torch.stack(squares).sum()
        if self.similarities and self.start:
            given = cosines(output.embeddings)
            terms["similarities"] = self.similarities * (given - cosines(self._features(output.images)).to(given.dtype)).square().mean()
        return terms

    @torch.no_grad()
    def _features(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C"]:
        """Return the global tokens of the starting backbone, in chunks that need little memory."""
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=self.half_start and images.is_cuda):
            return torch.cat([upcast_half(self.start[0](chunk)[:, 0]) for chunk in images.split(256)])
